"""Transfer rules for maps whose rows are virtual sources: views of nodes, which are not in the graph themselves.

A slice along the tokens of an up-projection is the same up-projection of a slice of the rows,
``(c W)[:, :n] = c[:, :n] W``, for every axis of the rows that is unchanged in the result. A tensor whose numbers were
copied along an axis is its first position, broadcast. Without virtual sources both end the walk.
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
    # A weight that lies along the axis differs between its positions, so a slice of the rows would need a slice of it.
    if not own or _in_factors(piece, own):
        return None
    return next((k for k, a in enumerate(piece.source_axes) if a == own), None)


def constant_along(piece: Piece, own: Axis) -> bool:
    """Whether X is the same at all positions of its axis ``own``."""
    return not _in_factors(piece, own) and not any(a in piece.source_atoms for a in own)


def _in_factors(piece: Piece, own: Axis) -> bool:
    return any(a in f.atoms for f in (piece.weight, piece.bias) if f is not None for a in own)


def some_rows(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """The map of a slice: that of the tensor it is taken from, over the slices of its rows."""
    how, taken = slice_of(node), {s.rows: s for s in maps.virtual.slices[node]}
    dim = how.dim
    refused = Stop(node, "unsupported_op", "a part of the rows is taken")
    length = fresh_axis(shape(node)[dim])
    source = maps.whole.map(how.x)
    # Cut along the columns: that is no slice of rows.
    if source.axis == dim:
        return refused

    def part(piece: Piece) -> Piece | Stop:
        own = piece.axes[dim]
        if constant_along(piece, own):
            return replace(piece, axes=_with(piece.axes, dim, length)).visited(node)
        sliced = None if piece.source is None else taken.get(piece.source)
        # The last condition: a source that the walk was told to end at lies on the way and would be skipped.
        if sliced is None or rows_axis(piece, own) != sliced.dim or any(v.node in maps.sources for v in piece.path[1:]):
            return refused
        # The atoms come from the shared analysis, so that slices of K and of V find the same tokens.
        tokens, last = maps.whole.axes_of(sliced.node)[sliced.dim], piece.path[-1]
        return replace(
            piece,
            axes=_with(piece.axes, dim, tokens),
            dtype=val(node).dtype,
            source=sliced.node,
            source_axes=_with(piece.source_axes, sliced.dim, tokens),
            path=(Visit(sliced.node, 0, 0), replace(last, node=node)),
            before=(*piece.before, *piece.path),
        )

    return source.each(part)


def one_of_all(maps: Maps, node: fx.Node, found: LinearMap | Stop) -> LinearMap:
    """The map of a tensor with the same numbers all along an axis: one of them, broadcast.

    ``found``: what its operator's rule gives, which is kept where it is broadcast along that axis as well.
    """
    shared = maps.virtual.shared[node]
    if isinstance(found, LinearMap) and all(constant_along(p, p.axes[shared.dim]) for p in found.pieces):
        return found
    # The walk ends here too, and a report that gets this far should say why.
    maps.reasons[shared.one] = Stop(shared.one, "unsupported_op", "a part of the rows is taken")
    own = maps.axes_of(shared.one)
    axes = (*own[: shared.dim], fresh_axis(shape(node)[shared.dim]), *own[shared.dim :])
    return LinearMap.single(Piece(axes, val(node).dtype, shared.one, own).visited(shared.one).visited(node))


def _with(axes: Axes, dim: int, own: Axis) -> Axes:
    return (*axes[:dim], own, *axes[dim + 1 :])
