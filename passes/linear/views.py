"""Transfer rules for operators that only rename or regroup axes: copies, casts, reshapes, permutations, broadcasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from mla_compile.passes.ir.axes import Axis, axis_size, flatten, fresh_axis, regroup
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.operators import Broadcast, Copy, Dropout, Permute, Regroup, Repeat
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.join import one_map
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, broadcast_to, finish, quantizes


def copied(maps: Maps, node: fx.Node, how: Copy | Dropout) -> LinearMap | Stop:
    """Pass values through copies, casts between floating dtypes, and inactive dropout."""
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return finish(maps.map(how.x), node)


def dropped(maps: Maps, node: fx.Node, how: Dropout) -> LinearMap | Stop:
    return Stop(node, "dropout", "dropout is active") if how.active else copied(maps, node, how)


def regrouped(maps: Maps, node: fx.Node, how: Regroup) -> LinearMap | Stop:
    source = maps.map(how.x)
    new, old = shape(node), shape(how.x)
    at = None if source.axis is None else _kept_axis(old, source.axis, new)
    # The segmented axis is reshaped, which only a single map allows.
    if at is None:
        whole = one_map(source, node)
        if whole is None:
            return Stop(node, "unsupported_op", "a reshape across columns that come from different sources")
        source = whole

    def reshape(piece: Piece) -> Piece | Stop:
        sizes = list(new)
        if at is not None and source.axis is not None:
            # Each piece has its own width along the segmented axis; the widths add up to the tensor's.
            sizes[at] = axis_size(piece.axes[source.axis])
        grouped = regroup(flatten(piece.axes), sizes)
        if grouped is None:
            return Stop(node, "unsupported_op", f"a reshape from {list(old)} to {list(new)} that cuts through factors")
        axes, split = grouped
        return replace(piece.split(split), axes=axes)

    return finish(source.each(reshape, at), node)


def _kept_axis(old: Sequence[Size], at: int, new: Sequence[Size]) -> int | None:
    """Return the position in shape ``new`` of axis ``at`` of shape ``old``, if the reshape keeps the axis."""
    outer = math.prod(old[:at])
    return next((k for k, s in enumerate(new) if same(s, old[at]) and same(math.prod(new[:k]), outer)), None)


def permuted(maps: Maps, node: fx.Node, how: Permute) -> LinearMap | Stop:
    source = maps.map(how.x)
    at = None if source.axis is None else how.order.index(source.axis)
    return finish(source.each(lambda p: replace(p, axes=tuple(p.axes[d] for d in how.order)), at), node)


def broadcast(maps: Maps, node: fx.Node, how: Broadcast) -> LinearMap | Stop:
    return finish(broadcast_to(maps.map(how.x), shape(node)), node)


def repeated(maps: Maps, node: fx.Node, how: Repeat) -> LinearMap | Stop:
    source = maps.map(how.x)
    extra = len(how.counts) - len(source.pieces[0].axes)
    at = None if source.axis is None else source.axis + extra
    # Repeating segments would need further segments for the same columns.
    if at is not None and how.counts[at] != 1:
        whole = one_map(source, node)
        if whole is None:
            return Stop(node, "unsupported_op", "columns from different sources are repeated")
        source, at = whole, None

    def tile(piece: Piece) -> Piece:
        axes: list[Axis] = []
        for k, count in enumerate(how.counts):
            own = piece.axes[k - extra] if k >= extra else ()
            copies = fresh_axis(count)
            # Interleaved copies are the inner factor of the axis; whole repetitions are the outer factor.
            axes.append((*own, *copies) if how.interleaved else (*copies, *own))
        return replace(piece, axes=tuple(axes))

    return finish(source.each(tile, at), node)
