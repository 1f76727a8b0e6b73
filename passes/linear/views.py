"""Transfer rules for operators that only rename or regroup axes: copies, casts, reshapes, permutations, broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir.axes import Axis, axis_size, flatten, fresh_axis, regroup
from mla_compile.passes.ir.graph import args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.join import one_map
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, broadcast_to, finish, quantizes
from mla_compile.passes.linear.stops import unexplained

aten = torch.ops.aten


def same_values(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Copies, casts between floating dtypes, inactive dropout: the values pass through."""
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return finish(maps.map(args_of(node)[0]), node)


def dropout(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    active = argument(node, 2, "train", True) and argument(node, 1, "p", 0.5) != 0
    return Stop(node, "dropout", "dropout is active") if active else same_values(maps, node)


def view(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Every operator that only regroups axes: view, reshape, flatten, unsqueeze, squeeze."""
    if val(node).dtype != val(args_of(node)[0]).dtype:
        return Stop(node, "nonlinear", f"the same bytes read as {val(node).dtype}")
    source = maps.map(args_of(node)[0])
    new, old = shape(node), shape(args_of(node)[0])
    at = None if source.axis is None else _kept_axis(old, source.axis, new)
    if at is None:
        whole = one_map(source, node)
        if whole is None:
            return Stop(node, "unsupported_op", "a reshape across columns that come from different sources")
        source = whole

    def reshape(piece: Piece) -> Piece | Stop:
        sizes = list(new)
        if at is not None and source.axis is not None:
            sizes[at] = axis_size(piece.axes[source.axis])
        grouped = regroup(flatten(piece.axes), sizes)
        if grouped is None:
            return Stop(node, "unsupported_op", f"a reshape from {list(old)} to {list(new)} that cuts through factors")
        axes, split = grouped
        return replace(piece.split(split), axes=axes)

    return finish(source.each(reshape, at), node)


def _kept_axis(old: Sequence[Size], at: int, new: Sequence[Size]) -> int | None:
    """Where axis ``at`` of shape ``old`` is in shape ``new``, if the reshape leaves it alone."""

    def before(sizes: Sequence[Size], k: int) -> Size:
        product: Size = 1
        for s in sizes[:k]:
            product = product * s
        return product

    for k, s in enumerate(new):
        if same(s, old[at]) and same(before(new, k), before(old, at)):
            return k
    return None


def permute(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    source = maps.map(args_of(node)[0])
    rank = len(shape(node))
    order = list(range(rank))
    op = packet(node)
    if op is aten.permute:
        order = [axis(d, rank) for d in args_of(node)[1]]
    elif op in (aten.movedim, aten.moveaxis):
        source_dims, target_dims = args_of(node)[1], args_of(node)[2]
        if isinstance(source_dims, int):
            source_dims, target_dims = [source_dims], [target_dims]
        moved = {axis(b, rank): axis(a, rank) for a, b in zip(source_dims, target_dims, strict=True)}
        left = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[d] if d in moved else next(left) for d in range(rank)]
    elif op in (aten.t, aten.numpy_T, aten.mT):
        order = order[::-1] if op is not aten.mT else [*order[:-2], order[-1], order[-2]]
    else:
        a, b = axis(args_of(node)[1], rank), axis(args_of(node)[2], rank)
        order[a], order[b] = order[b], order[a]
    at = None if source.axis is None else order.index(source.axis)
    return finish(source.each(lambda p: replace(p, axes=tuple(p.axes[d] for d in order)), at), node)


def expand(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    return finish(broadcast_to(maps.map(args_of(node)[0]), shape(node), node), node)


def repeat(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    source = maps.map(args_of(node)[0])
    if packet(node) in (aten.repeat, aten.tile):
        counts: list[Any] = list(args_of(node)[1])
        counts = [1] * (len(shape(node)) - len(counts)) + counts  # tile takes fewer numbers than there are axes
        interleaved = False
    else:
        dim = argument(node, 2, "dim")
        if not isinstance(args_of(node)[1], int) or dim is None:
            return unexplained(node)
        counts = [1] * len(shape(node))
        counts[axis(dim, len(counts))] = args_of(node)[1]
        interleaved = True
    if any(not isinstance(c, int) for c in counts):
        return unexplained(node)
    extra = len(counts) - len(source.pieces[0].axes)
    at = None if source.axis is None else source.axis + extra
    if at is not None and counts[at] != 1:
        whole = one_map(source, node)
        if whole is None:
            return Stop(node, "unsupported_op", "columns from different sources are repeated")
        source, at = whole, None

    def tile(piece: Piece) -> Piece:
        axes: list[Axis] = []
        for k, count in enumerate(counts):
            own = piece.axes[k - extra] if k >= extra else ()
            copies = fresh_axis(count)
            axes.append((*own, *copies) if interleaved else (*copies, *own))
        return replace(piece, axes=tuple(axes))

    return finish(source.each(tile, at), node)
