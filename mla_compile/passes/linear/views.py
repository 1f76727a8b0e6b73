"""Transfer rules for operators that only rename or regroup axes (copies, casts, reshapes, permutations, broadcasts)."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.moves import Copy, Dropout, Rearrange, Repeat
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.join import one_map
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, finish, quantizes


def copied(maps: Maps, node: fx.Node, how: Copy | Dropout) -> LinearMap | Stop:
    """Return the operand's map for copies, casts between floating dtypes, and inactive dropout."""
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return finish(maps.map(how.x), node)


def dropped(maps: Maps, node: fx.Node, how: Dropout) -> LinearMap | Stop:
    return Stop(node, "dropout", "dropout is active") if how.active else copied(maps, node, how)


def rearranged(maps: Maps, node: fx.Node, how: Rearrange) -> LinearMap | Stop:
    index, source = how.map, maps.map(how.x)
    if index is None:
        return _cut(node, how)
    at = None if source.axis is None else index.kept(source.axis)
    if source.axis is not None and at is None:  # if the segmented axis changes, the segments are merged
        whole = one_map(source, node)
        if whole is None:
            repeated = "columns from different sources are repeated"
            across = "a reshape across columns that come from different sources"
            return Stop(node, "unsupported_op", repeated if isinstance(how, Repeat) else across)
        source = whole

    def carried(piece: Piece) -> Piece | Stop:
        found = index.forward(piece.axes)
        return _cut(node, how) if found is None else replace(piece.split(found[1]), axes=found[0])

    return finish(source.each(carried, at), node)


def _cut(node: fx.Node, how: Rearrange) -> Stop:
    what = f"a reshape from {list(shape(how.x))} to {list(shape(node))} that cuts through factors"
    return Stop(node, "unsupported_op", what)
