"""The transfer rules of :mod:`mla_compile.passes.linear_map`: what each operator does to a linear map.

A rule takes the analysis and a node and returns the node's map, or a :class:`Stop` that says why there is none. The
maps of its operands are known when it is called. Contractions with weights are in :mod:`linear_contract`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.atoms import Atom, Axis, axis_size, flatten, fresh_axis, regroup
from mla_compile.passes.factors import merged, narrowed, scaled, total
from mla_compile.passes.graph import Size, argument, axis, packet, same, shape, val
from mla_compile.passes.linear_contract import CONTRACTIONS, add_weight, multiply_weight
from mla_compile.passes.linear_map import Factor, LinearMap, LinearMaps, Piece, Segment, Stop, unexplained

aten = torch.ops.aten
Rule = Callable[[LinearMaps, fx.Node], "LinearMap | Stop"]


def _finish(result: LinearMap | Stop, node: fx.Node) -> LinearMap | Stop:
    """Records ``node`` on the path of every piece, with its dtype."""
    if isinstance(result, Stop):
        return result
    dtype = val(node).dtype
    return result.each(lambda p: replace(p, dtype=dtype).visited(node))


def _quantizes(dtype: torch.dtype) -> bool:
    """Whether a conversion to ``dtype`` is more than rounding: to integers, to complex numbers, to 8 bits."""
    return not dtype.is_floating_point or dtype.itemsize < 2


def same_values(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """Copies, casts between floating dtypes, inactive dropout: the values pass through."""
    if _quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return _finish(maps.map(node.args[0]), node)  # type: ignore[arg-type]


def dropout(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    active = argument(node, 2, "train", True) and argument(node, 1, "p", 0.5) != 0
    return Stop(node, "dropout", "dropout is active") if active else same_values(maps, node)


def view(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """Every operator that only regroups axes: view, reshape, flatten, unsqueeze, squeeze."""
    source = maps.map(node.args[0])  # type: ignore[arg-type]
    new, old = shape(node), shape(node.args[0])  # type: ignore[arg-type]
    at = None if source.axis is None else _kept_axis(old, source.axis, new)
    if source.axis is not None and at is None:
        return Stop(node, "unsupported_op", "a reshape across columns that come from different sources")

    def reshape(piece: Piece) -> Piece | Stop:
        sizes = list(new)
        if at is not None and source.axis is not None:
            sizes[at] = axis_size(piece.axes[source.axis])
        grouped = regroup(flatten(piece.axes), sizes)
        if grouped is None:
            return Stop(node, "unsupported_op", f"a reshape from {list(old)} to {list(new)} that cuts through factors")
        axes, split = grouped
        if any(not isinstance(p.size, int) for a in split if a not in piece.source_atoms for p in split[a]):
            return Stop(node, "unsupported_op", "a reshape of weight columns to symbolic sizes")
        return replace(piece.split(split), axes=axes)

    return _finish(source.each(reshape, at), node)


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


def permute(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    source = maps.map(node.args[0])  # type: ignore[arg-type]
    rank = len(shape(node))
    order = list(range(rank))
    op = packet(node)
    if op is aten.permute:
        order = [axis(d, rank) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    elif op in (aten.t, aten.numpy_T, aten.mT):
        order = order[::-1] if op is not aten.mT else [*order[:-2], order[-1], order[-2]]
    else:
        a, b = axis(node.args[1], rank), axis(node.args[2], rank)  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    at = None if source.axis is None else order.index(source.axis)
    return _finish(source.each(lambda p: replace(p, axes=tuple(p.axes[d] for d in order)), at), node)


def expand(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    return _finish(broadcast_to(maps.map(node.args[0]), shape(node), node), node)  # type: ignore[arg-type]


def broadcast_to(source: LinearMap, new: Sequence[Size], node: fx.Node) -> LinearMap | Stop:
    """``source`` broadcast to shape ``new``: size-1 axes that grow become broadcast atoms."""
    extra = len(new) - len(source.pieces[0].axes)
    at = None if source.axis is None else source.axis + extra

    def grow(piece: Piece) -> Piece:
        axes: list[Axis] = [fresh_axis(s) for s in new[:extra]]
        for k, own in enumerate(piece.axes, start=extra):
            axes.append(own if own or k == at else fresh_axis(new[k]))
        return replace(piece, axes=tuple(axes))

    return source.each(grow, at)


def repeat(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    source = maps.map(node.args[0])  # type: ignore[arg-type]
    if packet(node) is aten.repeat:
        counts: list[Any] = list(node.args[1])  # type: ignore[arg-type]
        interleaved = False
    else:
        dim = argument(node, 2, "dim")
        if not isinstance(node.args[1], int) or dim is None:
            return unexplained(node)
        counts = [1] * len(shape(node))
        counts[axis(dim, len(counts))] = node.args[1]
        interleaved = True
    if any(not isinstance(c, int) for c in counts):
        return unexplained(node)
    extra = len(counts) - len(source.pieces[0].axes)
    at = None if source.axis is None else source.axis + extra
    if at is not None and counts[at] != 1:
        return Stop(node, "unsupported_op", "columns from different sources are repeated")

    def tile(piece: Piece) -> Piece:
        axes: list[Axis] = []
        for k, count in enumerate(counts):
            own = piece.axes[k - extra] if k >= extra else ()
            copies = fresh_axis(count)
            axes.append((*own, *copies) if interleaved else (*copies, *own))
        return replace(piece, axes=tuple(axes))

    return _finish(source.each(tile, at), node)


def part(source: LinearMap, dim: int, start: int, stop: int, step: int, node: fx.Node) -> LinearMap | Stop:
    """Positions ``start:stop:step`` of axis ``dim``."""
    if source.axis == dim:
        if step != 1:
            return Stop(node, "unsupported_op", "a strided slice across columns from different sources")
        kept: list[Segment] = []
        for s in source.segments:
            low, high = max(start, s.start), min(stop, s.stop)
            if low < high:
                piece = _part_of_piece(s.piece, dim, low - s.start, high - s.start, 1, node)
                if isinstance(piece, Stop):
                    return piece
                kept.append(Segment(low - start, high - start, piece))
        if not kept:
            return Stop(node, "unsupported_op", "an empty slice")
        return LinearMap(tuple(kept), dim) if len(kept) > 1 else LinearMap.single(kept[0].piece)
    return source.each(lambda p: _part_of_piece(p, dim, start, stop, step, node))


def _part_of_piece(piece: Piece, dim: int, start: int, stop: int, step: int, node: fx.Node) -> Piece | Stop:
    own = piece.axes[dim]
    if step == 1 and start == 0 and same(axis_size(own), stop):
        return piece
    if any(a in piece.source_atoms for a in own):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    atom = Atom(len(range(start, stop, step)))
    axes = tuple(() if k == dim and atom.size == 1 else (atom,) if k == dim else a for k, a in enumerate(piece.axes))

    def narrow(f: Factor | None) -> Factor | None | Stop:
        if f is None or not any(a in f.atoms for a in own):
            return f
        if not all(a in f.atoms for a in own):
            return Stop(node, "unsupported_op", "a slice across a broadcast axis")
        whole = own[0]
        if len(own) > 1:
            whole = Atom(axis_size(own))
            f = merged(f, own, whole)
        f = narrowed(f, whole, atom, start, stop, step)
        if atom.size == 1:  # a size-1 axis has no atom
            at = f.atoms.index(atom)
            sizes = [s for k, s in enumerate(f.expr.shape) if k != at]
            f = Factor(f.expr.view(sizes), tuple(a for a in f.atoms if a is not atom))
        return f

    weight, bias = narrow(piece.weight), narrow(piece.bias)
    if isinstance(weight, Stop) or isinstance(bias, Stop):
        return weight if isinstance(weight, Stop) else bias  # type: ignore[return-value]
    return replace(piece, axes=axes, weight=weight, bias=bias)


def slice_(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    x: Any = node.args[0]
    dim = axis(argument(node, 1, "dim", 0), len(shape(x)))
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    size, out = shape(x)[dim], shape(node)[dim]
    if same(size, out):
        return _finish(maps.map(x), node)
    if not isinstance(size, int) or any(isinstance(v, fx.Node) for v in (start, stop, step)):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    return _finish(part(maps.map(x), dim, *slice(start, stop, step).indices(size), node), node)


def select(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    x: Any = node.args[0]
    dim, index = axis(node.args[1], len(shape(x))), node.args[2]  # type: ignore[arg-type]
    return _finish(_select(maps.map(x), dim, index, shape(x)[dim], node), node)


def _select(source: LinearMap, dim: int, index: object, size: Size, node: fx.Node) -> LinearMap | Stop:
    if not isinstance(index, int) or not isinstance(size, int):
        return Stop(node, "unsupported_op", "one row is taken")
    index = axis(index, size)
    one = part(source, dim, index, index + 1, 1, node)
    if isinstance(one, Stop):
        return one
    at = None if one.axis is None else one.axis - (one.axis > dim)
    return one.each(lambda p: replace(p, axes=p.axes[:dim] + p.axes[dim + 1 :]), at)


_SPLITS = {aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind, aten.unsafe_split}


def getitem(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """One part of a split, chunk or unbind."""
    whole: Any = node.args[0]
    index: Any = node.args[1]
    if packet(whole) not in _SPLITS:
        return unexplained(node)
    x: Any = whole.args[0]
    if packet(whole) is aten.unbind:
        dim = axis(argument(whole, 1, "dim", 0), len(shape(x)))
        return _finish(_select(maps.map(x), dim, index, shape(x)[dim], node), node)
    dim = axis(argument(whole, 2, "dim", 0), len(shape(x)))
    sizes = [t.shape[dim] for t in whole.meta["val"]]
    if len(sizes) == 1:
        return _finish(maps.map(x), node)
    if any(not isinstance(s, int) for s in sizes):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    start = sum(sizes[:index])
    return _finish(part(maps.map(x), dim, start, start + sizes[index], 1, node), node)


def nothing(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """A tensor made of zeros, or of nothing yet."""
    op = packet(node)
    if op in (aten.full, aten.full_like, aten.new_full):
        position = 1 if op is aten.full or op is aten.full_like else 2
        if argument(node, position, "fill_value") != 0:
            return unexplained(node)
    defined = op not in (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
    piece = Piece(tuple(fresh_axis(s) for s in shape(node)), val(node).dtype, defined=defined)
    return LinearMap.single(piece.visited(node))


def _segments_of(source: LinearMap, dim: int, node: fx.Node) -> tuple[Segment, ...] | Stop:
    """``source`` as segments along ``dim``."""
    if source.axis == dim:
        return source.segments
    if source.axis is not None:
        return Stop(node, "unsupported_op", "columns from different sources along two axes")
    piece = source.pieces[0]
    size = axis_size(piece.axes[dim])
    if not isinstance(size, int):
        return Stop(node, "token_mixing", "rows of several tensors are joined")
    return (Segment(0, size, piece),)


def _joinable(maps: Sequence[LinearMap], dim: int, rank: int) -> bool:
    """Whether ``dim`` holds features: it is the last axis, or some piece has columns of a weight there."""
    return dim == rank - 1 or any(
        p.weight is not None and any(a in p.weight.atoms for a in p.axes[dim]) for m in maps for p in m.pieces
    )


def cat(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    inputs: Any = node.args[0]
    rank = len(shape(node))
    dim = axis(argument(node, 1, "dim", 0), rank)
    if any(maps.is_weight(x) and packet(x) not in _FILLS for x in inputs):
        return Stop(node, "unsupported_op", "constants are joined to columns of a linear map")
    sources = [maps.map(x) for x in inputs]
    if not _joinable(sources, dim, rank):
        return Stop(node, "token_mixing", "rows of several tensors are joined")
    joined: list[Segment] = []
    offset = 0
    for source in sources:
        segments = _segments_of(source, dim, node)
        if isinstance(segments, Stop):
            return segments
        joined += [Segment(offset + s.start, offset + s.stop, s.piece) for s in segments]
        offset = joined[-1].stop
    joined = [s for s in joined if s.start < s.stop] or joined[:1]
    result = LinearMap(tuple(joined), dim) if len(joined) > 1 else LinearMap.single(joined[0].piece)
    return _finish(result, node)


def copy(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """``copy(target, source)``: the source's values, broadcast to the target's shape."""
    x: Any = node.args[1]
    if maps.is_weight(x) or not val(x).dtype.is_floating_point:
        return unexplained(node)
    if _quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return _finish(broadcast_to(maps.map(x), shape(node), node), node)


def slice_scatter(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    """Columns ``start:end`` of the base replaced by another map."""
    base, x = node.args[0], node.args[1]
    rank = len(shape(node))
    dim = axis(argument(node, 2, "dim", 0), rank)
    size = shape(node)[dim]
    bounds = argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
    if maps.is_weight(x) or (maps.is_weight(base) and packet(base) not in _FILLS):
        return unexplained(node)
    new, old = maps.map(x), maps.map(base)  # type: ignore[arg-type]
    if same(size, shape(x)[dim]):  # type: ignore[arg-type]
        return _finish(new, node)
    if not isinstance(size, int) or any(isinstance(b, fx.Node) for b in bounds) or not _joinable([new, old], dim, rank):
        return Stop(node, "token_mixing", "rows of another tensor are overwritten")
    start, stop, step = slice(*bounds).indices(size)
    if step != 1:
        return Stop(node, "unsupported_op", "columns are interleaved")
    if start >= stop:
        return _finish(old, node)
    base_segments, segments = _segments_of(old, dim, node), _segments_of(new, dim, node)
    if isinstance(base_segments, Stop) or isinstance(segments, Stop):
        return base_segments if isinstance(base_segments, Stop) else segments
    kept: list[Segment] = []
    for s in base_segments:
        for low, high in ((s.start, min(s.stop, start)), (max(s.start, stop), s.stop)):
            if low < high:
                piece = _part_of_piece(s.piece, dim, low - s.start, high - s.start, 1, node)
                if isinstance(piece, Stop):
                    return piece
                kept.append(Segment(low, high, piece))
    kept += [Segment(start + s.start, start + s.stop, s.piece) for s in segments]
    kept.sort(key=lambda s: s.start)
    result = LinearMap(tuple(kept), dim) if len(kept) > 1 else LinearMap.single(kept[0].piece)
    return _finish(result, node)


def pad(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    x, widths = node.args[0], node.args[1]
    mode = argument(node, 2, "mode", "constant") if packet(node) is aten.pad else "constant"
    value = argument(node, 3 if packet(node) is aten.pad else 2, "value", 0)
    if mode != "constant" or value not in (0, None) or any(not isinstance(w, int) for w in widths):  # type: ignore[union-attr]
        return unexplained(node)
    before, after, *others = widths  # type: ignore[misc]
    dim = len(shape(node)) - 1
    source = maps.map(x)  # type: ignore[arg-type]
    segments = _segments_of(source, dim, node)
    if any(others) or before < 0 or after < 0 or isinstance(segments, Stop):  # type: ignore[operator]
        return unexplained(node)
    zeros = [
        Segment(start, stop, Piece((*(fresh_axis(s) for s in shape(node)[:-1]), fresh_axis(stop - start)), val(node).dtype))
        for start, stop in ((0, before), (before + segments[-1].stop, before + segments[-1].stop + after))
        if start < stop
    ]
    moved = [Segment(s.start + before, s.stop + before, s.piece) for s in segments]
    return _finish(LinearMap(tuple(sorted(zeros + moved, key=lambda s: s.start)), dim), node)


def negate(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    return _finish(_times(maps.map(node.args[0]), -1.0), node)  # type: ignore[arg-type]


def _times(source: LinearMap, by: float) -> LinearMap | Stop:
    def scale(p: Piece) -> Piece:
        return replace(p, scale=p.scale * by, bias=None if p.bias is None else scaled(p.bias, by))

    return source.each(scale)


def multiply(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    a, b = node.args[0], node.args[1]
    if packet(node) is aten.div and (not isinstance(a, fx.Node) or maps.is_weight(a) or node.kwargs.get("rounding_mode")):
        return unexplained(node)
    if not isinstance(a, fx.Node) or maps.is_weight(a):
        a, b = b, a
    assert isinstance(a, fx.Node)
    if not val(node).dtype.is_floating_point or not val(a).dtype.is_floating_point:
        return unexplained(node)
    if isinstance(b, (int, float)):
        return _finish(_times(maps.map(a), 1.0 / b if packet(node) is aten.div else float(b)), node)
    if not maps.is_weight(b):
        return Stop(node, "position_dependent", f"{packet(node).__name__} with a factor that is computed from the inputs")
    return multiply_weight(maps, node, a, b, reciprocal=packet(node) is aten.div)  # type: ignore[arg-type]


def add(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    a, b = node.args[0], node.args[1]
    alpha: Any = node.kwargs.get("alpha", 1)
    sign = -1.0 if packet(node) is aten.sub else 1.0
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or not isinstance(alpha, (int, float)):
        return unexplained(node)
    factor = sign * float(alpha)
    if maps.is_weight(b):
        return add_weight(maps, node, a, b, factor)
    if maps.is_weight(a):
        return add_weight(maps, node, b, a, 1.0) if factor == 1.0 else unexplained(node)
    left, right = maps.map(a), maps.map(b)
    for m, x in ((left, a), (right, b)):
        if len(shape(x)) != len(shape(node)) or m.axis is not None:
            return Stop(node, "unsupported_op", "a sum of maps with different columns")
    piece = _sum(left.pieces[0], right.pieces[0], factor, node)
    return piece if isinstance(piece, Stop) else LinearMap.single(piece)


def _sum(a: Piece, b: Piece, factor: float, node: fx.Node) -> Piece | Stop:
    """``a + factor * b`` for two maps of one source: the weights are added (LoRA)."""
    different = Stop(node, "position_dependent", "a sum of maps of different sources")
    if a.source is None or a.source is not b.source or (a.weight is None) != (b.weight is None):
        return different
    if a.source_axes != b.source_axes:
        return different
    rename: dict[Atom, Atom] = {}
    for own, other in zip(a.axes, b.axes, strict=True):
        if len(own) != len(other) or not all(same(x.size, y.size) for x, y in zip(own, other, strict=True)):
            return different
        for x, y in zip(own, other, strict=True):
            if (x in a.source_atoms or y in b.source_atoms) and x is not y:
                return different
            rename[y] = x

    def renamed(f: Factor | None) -> Factor | None:
        return None if f is None else Factor(f.expr, tuple(rename.get(x, x) for x in f.atoms))

    common = {v.node for v in b.path}
    last = max((a.path[-1], b.path[-1]), key=lambda v: v.contractions)
    path = (*(v for v in a.path if v.node in common), replace(last, node=node))
    bias = total(a.bias, renamed(b.bias), factor)
    a = replace(a, bias=bias, path=path, dtype=val(node).dtype)
    if a.weight is None or b.weight is None:
        return replace(a, scale=a.scale + factor * b.scale)
    other_weight = renamed(b.weight)
    assert other_weight is not None
    weight = total(scaled(a.weight, a.scale), scaled(other_weight, b.scale), factor)
    return replace(a, weight=weight, scale=1.0)


def narrow(maps: LinearMaps, node: fx.Node) -> LinearMap | Stop:
    x: Any = node.args[0]
    dim, start, length = axis(node.args[1], len(shape(x))), node.args[2], node.args[3]  # type: ignore[arg-type]
    if not isinstance(start, int) or not isinstance(length, int):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    return _finish(part(maps.map(x), dim, start, start + length, 1, node), node)


_FILLS = {
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.zeros,
    aten.zeros_like, aten.new_zeros, aten.full, aten.full_like, aten.new_full,
}  # fmt: skip

RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh, aten.lift_fresh_copy,
            aten._to_copy, aten.to, aten.type_as,
        ),
        same_values,
    ),
    aten.dropout: dropout,
    **dict.fromkeys(
        (
            aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias, aten.flatten, aten.unflatten,
            aten.unsqueeze, aten.squeeze, aten.view_as, aten.reshape_as,
        ),
        view,
    ),
    **dict.fromkeys((aten.permute, aten.transpose, aten.t, aten.numpy_T, aten.mT, aten.swapaxes), permute),
    **dict.fromkeys((aten.expand, aten.expand_as), expand),
    **dict.fromkeys((aten.repeat, aten.repeat_interleave), repeat),
    aten.slice: slice_,
    aten.narrow: narrow,
    aten.select: select,
    operator.getitem: getitem,
    **dict.fromkeys(_FILLS, nothing),
    **dict.fromkeys((aten.cat, aten.concat), cat),
    aten.copy: copy,
    aten.slice_scatter: slice_scatter,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), pad),
    aten.neg: negate,
    **dict.fromkeys((aten.mul, aten.div, aten.multiply, aten.true_divide), multiply),
    **dict.fromkeys((aten.add, aten.sub), add),
    **CONTRACTIONS,
}  # fmt: skip

