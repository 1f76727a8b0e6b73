"""Transfer rules for virtual sources: slices and other changes of rows that are not nodes of the graph.

Slicing tokens commutes with an up-projection: ``(c W)[:, :n] = c[:, :n] W``. So does slicing along any other axis of
the rows that the result keeps. If there is no bias, zero pads (``pad(c W) = pad(c) W``) and factors per row
(``(c W) g = (c g) W``) also commute. A tensor that is constant along an axis equals its first position, broadcast.
Without virtual sources, all of these operators end the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, Axes, Axis, fresh_axis
from mla_compile.passes.ir.expr import Factor
from mla_compile.passes.ir.factors import part_of
from mla_compile.passes.ir.graph import args_of, argument, axis, elements_hint, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same, same_sizes
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, Visit

aten = torch.ops.aten


@dataclass(frozen=True)
class Taken:
    """Some rows of ``x`` along axis ``dim``, or all rows with zero rows around.

    ``padded``: how many zero rows are added before and after. ``index``: the only position; the axis is then dropped.
    ``at``: a tensor with the positions of the rows.
    """

    x: fx.Node
    dim: int
    padded: tuple[int, int] | None = None
    index: int | None = None
    at: fx.Node | None = None


def taken_of(node: fx.Node) -> Taken | None:
    """Read ``node`` as a slice, selection, pick or zero pad along one axis of a tensor; None if it is none of these."""
    if (picked := picked_of(node)) is not None:
        return picked
    how = decode(node)
    if isinstance(how, Slice):
        return Taken(how.x, how.dim)
    if isinstance(how, Select):
        return None if how.index is None else Taken(how.x, how.dim, index=how.index)
    padding = zeros_around(node)
    if padding is None:
        return None
    axes = [dim for dim, widths in enumerate(padding) if widths != (0, 0)]
    # Zeros along the features are columns, which the rule `pad` handles.
    if len(axes) != 1 or axes[0] == len(padding) - 1:
        return None
    return Taken(args_of(node)[0], axes[0], padding[axes[0]])


def picked_of(node: fx.Node) -> Taken | None:
    """Read ``node`` as indexing along one axis by a tensor of positions; None if ``node`` does anything else."""
    if packet(node) is aten.index_select:
        x, dim, at = args_of(node)
        dim = axis(dim, len(shape(x)))
    elif packet(node) is aten.index and sum(one is not None for one in args_of(node)[1]) == 1:
        x, indices = args_of(node)
        ((dim, at),) = ((k, one) for k, one in enumerate(indices) if one is not None)
    else:
        return None
    # A boolean mask is not a list of positions. It picks one row per True value.
    return Taken(x, dim, at=at) if len(shape(at)) == 1 and val(at).dtype in (torch.int64, torch.int32) else None


def pick(call: Callable[..., fx.Node], node: fx.Node, rows: fx.Node, dim: int) -> fx.Node:
    """Apply the indexing of ``node`` to axis ``dim`` of ``rows``. ``call(op, *args)`` applies an operator."""
    picked = picked_of(node)
    assert picked is not None
    if packet(node) is aten.index_select:
        return call(aten.index_select.default, rows, dim, picked.at)
    # `index_select` cannot replace `index`, which counts negative positions from the end.
    return call(aten.index.Tensor, rows, [*[None] * dim, picked.at])


def zeros_around(node: fx.Node) -> list[tuple[int, int]] | None:
    """Return how many zeros a pad adds before and after each axis; None for other operators and unknown numbers."""
    widths = zero_widths(node)
    if widths is None or any(not isinstance(w, int) or w < 0 for w in widths):
        return None
    pairs = [*zip(widths[::2], widths[1::2], strict=True)]
    return [*[(0, 0)] * (len(shape(node)) - len(pairs)), *pairs[::-1]]


def zero_widths(node: fx.Node) -> Sequence[Any] | None:
    """Return the widths of a pad with zeros, last axis first, as numbers or nodes; None for all other operators."""
    if packet(node) not in (aten.pad, aten.constant_pad_nd):
        return None
    mode = argument(node, 2, "mode", "constant") if packet(node) is aten.pad else "constant"
    value = argument(node, 3 if packet(node) is aten.pad else 2, "value", 0)
    # Other modes repeat tokens. With any other value, the new rows are not zero.
    return args_of(node)[1] if mode == "constant" and value in (0, None) else None


def pad_along(rank: int, dim: int, widths: tuple[int, int]) -> tuple[int, ...]:
    """Return the padding argument that pads only axis ``dim``."""
    return (*(0,) * 2 * (rank - 1 - dim), *widths)


def may_be_taken(piece: Piece, own: Axis, taken: Taken) -> bool:
    """Whether a slice or pad of X along its axis ``own`` can move to the source.

    Every slice can. A pad cannot if X has a bias, or if X is constant along ``own`` but not zero.
    """
    return taken.padded is None or (piece.bias is None and (piece.source is None or not constant_along(piece, own)))


def rows_axis(piece: Piece, own: Axis) -> int | None:
    """Return the source axis that equals ``own``, an axis of X.

    Return None if no source axis does, or if a weight or bias has atoms of ``own``.
    """
    # If a weight lies along the axis, a slice of the rows would also need a slice of the weight.
    if not own or _in_factors(piece, own):
        return None
    return next((k for k, a in enumerate(piece.source_axes) if a == own), None)


def position_axis(piece: Piece, own: Axis) -> int | None:
    """Return the source axis that equals ``own``, an axis of X, or that has ``own`` as its outer factors.

    Return None if there is no such axis, or if a weight or bias has only some atoms of ``own``.
    """
    if not own or any(0 < len({*own} & {*f.atoms}) < len(own) for f in (piece.weight, piece.bias) if f is not None):
        return None
    return next((k for k, a in enumerate(piece.source_axes) if a[: len(own)] == own), None)


def constant_along(piece: Piece, own: Axis) -> bool:
    """Whether X has the same value at all positions of its axis ``own``."""
    return not _in_factors(piece, own) and not any(a in piece.source_atoms for a in own)


def _in_factors(piece: Piece, own: Axis) -> bool:
    return any(a in f.atoms for f in (piece.weight, piece.bias) if f is not None for a in own)


def some_rows(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of a slice of X: the map of X, with the rows replaced by slices of the rows."""
    how, taken = taken_of(node), {s.rows: s for s in maps.virtual.slices[node]}
    assert how is not None
    dim = how.dim
    refused = Stop(node, "unsupported_op", "only a part of the rows is read")
    length = fresh_axis(shape(node)[dim]) if how.index is None else ()
    source = maps.whole.map(how.x)
    # This cuts the columns, so it is not a slice of rows.
    if source.axis == dim:
        return refused

    def part(piece: Piece) -> Piece | Stop:
        own = piece.axes[dim]
        if not may_be_taken(piece, own, how):
            return refused
        if constant_along(piece, own):
            axes = _without(piece.axes, dim) if how.index is not None else _with(piece.axes, dim, length)
            return replace(piece, axes=axes).visited(node)
        if how.index is not None:
            return one_position(piece, own, how.index)
        sliced = None if piece.source is None else taken.get(piece.source)
        # A chosen source on the path is refused, because the map of the slice would skip the chosen source.
        if sliced is None or rows_axis(piece, own) != sliced.dim or any(v.node in maps.sources for v in piece.path[1:]):
            return refused
        # The atoms of the shared analysis are used, so that slices of K and V have the same tokens.
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

    def one_position(piece: Piece, own: Axis, index: int) -> Piece | Stop:
        selected = None if piece.source is None else taken.get(piece.source)
        if selected is None or position_axis(piece, own) != selected.dim:
            return refused
        if any(v.node in maps.sources for v in piece.path[1:]):
            return refused
        rest, last = piece.source_axes[selected.dim][len(own) :], piece.path[-1]
        axes = _with(piece.source_axes, selected.dim, rest) if rest else _without(piece.source_axes, selected.dim)
        return replace(
            piece,
            axes=_without(piece.axes, dim),
            dtype=val(node).dtype,
            source=selected.node,
            source_axes=axes,
            weight=piece.weight and _at(piece.weight, own, index),
            bias=piece.bias and _at(piece.bias, own, index),
            path=(Visit(selected.node, 0, 0), replace(last, node=node)),
            before=(*piece.before, *piece.path),
        )

    at = None if source.axis is None else source.axis - (how.index is not None and source.axis > dim)
    return source.each(part, at)


def _at(factor: Factor, own: Axis, index: int) -> Factor:
    """Return ``factor`` at one position of the axis ``own``, or unchanged if ``factor`` does not have this axis."""
    return part_of(factor, own, Atom(1), range(index, index + 1)) if own[0] in factor.atoms else factor


@dataclass(frozen=True)
class Gated:
    """``x``, multiplied or divided by ``gate``, a tensor that broadcasts to ``x``."""

    x: fx.Node
    gate: fx.Node


def gated_of(maps: Maps, node: fx.Node) -> Gated | None:
    """Return the operands if ``node`` scales rows by a smaller tensor that is not a weight; None otherwise."""
    if packet(node) not in (aten.mul, aten.div) or node.kwargs:
        return None
    a, b = args_of(node)
    if not all(isinstance(n, fx.Node) and is_tensor(n) and not maps.is_weight(n) for n in (a, b)):
        return None
    if packet(node) is aten.mul and elements_hint(a) < elements_hint(b):
        a, b = b, a
    floating = all(val(n).dtype.is_floating_point for n in (a, b))
    narrower = elements_hint(b) < elements_hint(a)
    return Gated(a, b) if floating and narrower and same_sizes(shape(a), shape(node)) else None


def gate_along(piece: Piece, gate: fx.Node) -> list[int | None] | None:
    """Return the axis of ``gate`` for each axis of the source; None for an axis along which ``gate`` is constant.

    Return None instead of a list if X has a bias, if X is not projected, or if ``gate`` varies along something other
    than whole axes of the rows.
    """
    if piece.source is None or piece.bias is not None or not piece.projected:
        return None
    sizes, missing = shape(gate), len(piece.axes) - len(shape(gate))
    along: list[int | None] = [None] * len(piece.source_axes)
    for k, length in enumerate(sizes):
        if not same(length, 1):
            at = rows_axis(piece, piece.axes[k + missing])
            if at is None:
                return None
            along[at] = k
    return along


def gated_rows(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of X times a number per row: the map of X, with the rows replaced by rows times these numbers."""
    how, gated = gated_of(maps, node), {g.rows: g for g in maps.virtual.gates[node]}
    assert how is not None

    def multiplied(piece: Piece) -> Piece | Stop:
        own = None if piece.source is None else gated.get(piece.source)
        # A chosen source on the path is refused, because the new map would skip the chosen source.
        if own is None or gate_along(piece, how.gate) is None or any(v.node in maps.sources for v in piece.path[1:]):
            return Stop(
                node, "position_dependent", f"{packet(node).__name__} with a factor that is computed from inputs"
            )
        return replace(
            piece,
            dtype=val(node).dtype,
            source=own.node,
            path=(Visit(own.node, 0, 0), replace(piece.path[-1], node=node)),
            before=(*piece.before, *piece.path),
        )

    return maps.whole.map(how.x).each(multiplied)


def one_of_all(maps: Maps, node: fx.Node, found: LinearMap | Stop) -> LinearMap:
    """Return the map of a tensor that is constant along an axis: its first position, broadcast.

    ``found``: the result of the operator's own rule. If ``found`` is a map that is also constant along this axis,
    ``found`` is returned.
    """
    shared = maps.virtual.shared[node]
    if isinstance(found, LinearMap) and all(constant_along(p, p.axes[shared.dim]) for p in found.pieces):
        return found
    # The walk ends at this virtual source, so reports need a reason for it.
    maps.reasons[shared.one] = Stop(shared.one, "unsupported_op", "only a part of the rows is read")
    own = maps.axes_of(shared.one)
    axes = (*own[: shared.dim], fresh_axis(shape(node)[shared.dim]), *own[shared.dim :])
    return LinearMap.single(Piece(axes, val(node).dtype, shared.one, own).visited(shared.one).visited(node))


def _without(axes: Axes, dim: int) -> Axes:
    return (*axes[:dim], *axes[dim + 1 :])


def _with(axes: Axes, dim: int, own: Axis) -> Axes:
    return (*axes[:dim], own, *axes[dim + 1 :])
