"""Transfer rule for a slice along the tokens of what weights make of rows: the same map of a slice of the rows.

``(c W)[:, :n] = c[:, :n] W``, for every axis of the rows that is, as it is, an axis of the result. The slices of the
rows are nodes that :mod:`mla_compile.passes.decide.slice_rows` added; without them a slice of tokens ends the walk.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mla_compile.passes.ir.axes import Axes, Axis, fresh_axis
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.operators import Slice, decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, Visit


def slice_of(node: fx.Node) -> Slice:
    """``node`` as the slice that it is known to be."""
    how = decode(node)
    assert isinstance(how, Slice)
    return how


def rows_axis(piece: Piece, own: Axis) -> int | None:
    """The axis of the source that ``own``, an axis of X, is the whole of; None where there is none."""
    if not own or _in_factors(piece, own):
        return None
    return next((k for k, a in enumerate(piece.source_axes) if a == own), None)


def constant_along(piece: Piece, own: Axis) -> bool:
    """Whether X is the same at all positions of its axis ``own``."""
    return not _in_factors(piece, own) and not any(a in piece.source_atoms for a in own)


def _in_factors(piece: Piece, own: Axis) -> bool:
    return any(a in f.atoms for f in (piece.weight, piece.bias) if f is not None for a in own)


def some_rows(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """The map of a slice: that of the tensor it is taken of, over the slices of its rows."""
    how, taken = slice_of(node), {s.rows: s for s in maps.shown[node]}
    dim = how.dim
    refused = Stop(node, "unsupported_op", "a part of the rows is taken")
    length = fresh_axis(shape(node)[dim])
    source = maps.whole.map(how.x)
    if source.axis == dim:
        return refused

    def part(piece: Piece) -> Piece | Stop:
        own = piece.axes[dim]
        if constant_along(piece, own):
            return replace(piece, axes=_with(piece.axes, dim, length)).visited(node)
        shown = None if piece.source is None else taken.get(piece.source)
        if shown is None or rows_axis(piece, own) != shown.dim or any(v.node in maps.stops for v in piece.path[1:]):
            return refused
        tokens, last = maps.whole.axes_of(shown.node)[shown.dim], piece.path[-1]
        return replace(
            piece,
            axes=_with(piece.axes, dim, tokens),
            dtype=val(node).dtype,
            source=shown.node,
            source_axes=_with(piece.source_axes, shown.dim, tokens),
            path=(Visit(shown.node, 0, 0), replace(last, node=node)),
            before=(*piece.before, *piece.path),
        )

    return source.each(part)


def _with(axes: Axes, dim: int, own: Axis) -> Axes:
    return (*axes[:dim], own, *axes[dim + 1 :])
