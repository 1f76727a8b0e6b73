"""Transfer rules for operators that take parts of a tensor or assemble one from parts.

Parts of a weight's columns stay linear maps; parts of the tokens do not (the rows would be others). A tensor assembled
along its features becomes a row of segments, each with a source of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, axis_size, fresh_axis
from mla_compile.passes.ir.expr import Factor
from mla_compile.passes.ir.factors import merged, narrowed
from mla_compile.passes.ir.graph import args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.operators import FILLS
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.join import joint_of, one_map, stacked
from mla_compile.passes.linear.records import (
    LinearMap,
    Maps,
    Piece,
    RowsJoined,
    Segment,
    broadcast_to,
    finish,
    quantizes,
)
from mla_compile.passes.linear.stops import unexplained

aten = torch.ops.aten


def part(source: LinearMap, dim: int, start: int, stop: int, step: int, node: fx.Node) -> LinearMap | Stop:
    """Positions ``start:stop:step`` of axis ``dim``."""
    if source.axis == dim and step != 1:
        source = one_map(source, node) or source
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

    def narrow(f: Factor | None) -> Factor | Stop | None:
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
    if isinstance(weight, Stop):
        return weight
    if isinstance(bias, Stop):
        return bias
    return replace(piece, axes=axes, weight=weight, bias=bias)


def slice_(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    x: Any = args_of(node)[0]
    dim = axis(argument(node, 1, "dim", 0), len(shape(x)))
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    size, out = shape(x)[dim], shape(node)[dim]
    if same(size, out):
        return finish(maps.map(x), node)
    if not isinstance(size, int) or any(isinstance(v, fx.Node) for v in (start, stop, step)):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    return finish(part(maps.map(x), dim, *slice(start, stop, step).indices(size), node), node)


def narrow(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    x: Any = args_of(node)[0]
    dim, start, length = axis(args_of(node)[1], len(shape(x))), args_of(node)[2], args_of(node)[3]
    size = shape(x)[dim]
    if not isinstance(start, int) or not isinstance(length, int) or not isinstance(size, int):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    start = axis(start, size)
    return finish(part(maps.map(x), dim, start, start + length, 1, node), node)


def select(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    x: Any = args_of(node)[0]
    dim, index = axis(args_of(node)[1], len(shape(x))), args_of(node)[2]
    size = shape(x)[dim]
    while (write := _write(_itself(x), dim)) is not None and isinstance(index, int) and isinstance(size, int):
        if write.at == axis(index, size):
            return unexplained(node) if maps.is_weight(write.value) else finish(maps.map(write.value), node)
        x = write.base
    return finish(_select(maps.map(x), dim, index, size, node), node)


class _Write(NamedTuple):
    """``select_scatter``: ``base`` with ``value`` in place of what it had at position ``at`` of an axis."""

    base: fx.Node
    value: fx.Node
    at: int


def _write(node: fx.Node, dim: int) -> _Write | None:
    """``node`` as a write to axis ``dim``; None where it is something else."""
    if packet(node) is not aten.select_scatter:
        return None
    base, value, along, index = (argument(node, k, name) for k, name in enumerate(("self", "src", "dim", "index")))
    size = shape(node)[dim]
    known = isinstance(index, int) and isinstance(size, int) and val(value).dtype == val(node).dtype
    return _Write(base, value, axis(index, size)) if known and axis(along, len(shape(node))) == dim else None


def _itself(node: fx.Node) -> fx.Node:
    """``node``, or what it is the whole of: with symbolic sizes, ``x[:, :]`` is read and written as a slice."""
    while packet(node) in (aten.slice, aten.slice_scatter):
        x: Any = args_of(node)[0 if packet(node) is aten.slice else 1]
        if val(x).dtype != val(node).dtype or not all(map(same, shape(x), shape(node))):
            return node
        node = x
    return node


def select_scatter(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Heads written one by one into a tensor, the last of them by ``node``: where all of them are, their stack."""
    dim = axis(argument(node, 2, "dim"), len(shape(node)))
    written: dict[int, fx.Node] = {}
    current = node
    while (write := _write(_itself(current), dim)) is not None:
        written.setdefault(write.at, write.value)
        if len(written) == shape(node)[dim]:
            return _stack(maps, [written[k] for k in range(len(written))], dim, node)
        current = write.base
    return _overwritten(node)


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


def getitem(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """One part of a split, chunk or unbind."""
    whole: Any = args_of(node)[0]
    index: Any = args_of(node)[1]
    if packet(whole) not in _SPLITS:
        return unexplained(node)
    x: Any = args_of(whole)[0]
    if packet(whole) is aten.unbind:
        dim = axis(argument(whole, 1, "dim", 0), len(shape(x)))
        return finish(_select(maps.map(x), dim, index, shape(x)[dim], node), node)
    dim = axis(argument(whole, 2, "dim", 0), len(shape(x)))
    sizes = [t.shape[dim] for t in whole.meta["val"]]
    if len(sizes) == 1:
        return finish(maps.map(x), node)
    if any(not isinstance(s, int) for s in sizes):
        return Stop(node, "unsupported_op", "a part of the rows is taken")
    start = sum(sizes[:index])
    return finish(part(maps.map(x), dim, start, start + sizes[index], 1, node), node)


def _fill(node: fx.Node) -> fx.Node | None:
    """What filled ``node``, itself or a part of what was filled; None where it is something else."""
    while packet(node) in (aten.slice, aten.narrow, aten.select):
        node = args_of(node)[0]
    return node if packet(node) in FILLS else None


def _overwritten(node: fx.Node) -> Stop:
    """What is said of a write that is not followed; parts of zeros, or of nothing yet, are heads as well as tokens."""
    base = node
    while packet(base) in (aten.slice, aten.slice_scatter, aten.select_scatter):
        base = args_of(base)[0]
    if packet(base) in FILLS:
        return Stop(node, "unsupported_op", "a tensor is put together from parts")
    return Stop(node, "token_mixing", "rows of another tensor are overwritten")


def nothing(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """A tensor made of zeros, or of nothing yet."""
    filled = _fill(node)
    if filled is None:
        return unexplained(node)
    op = packet(filled)
    if op in (aten.full, aten.full_like, aten.new_full):
        position = 1 if op is aten.full or op is aten.full_like else 2
        if argument(filled, position, "fill_value") != 0:
            return unexplained(node)
    defined = op not in (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
    piece = Piece(tuple(fresh_axis(s) for s in shape(node)), val(node).dtype, defined=defined)
    return LinearMap.single(piece.visited(node))


def _map_of(maps: Maps, x: fx.Node) -> LinearMap | Stop:
    """The map of an operand; one made of zeros, or of nothing yet, has no source even where it is a constant."""
    return nothing(maps, x) if maps.is_weight(x) else maps.map(x)


def _segments_of(source: LinearMap, dim: int, node: fx.Node) -> tuple[Segment, ...] | Stop:
    """``source`` as segments along ``dim``."""
    if source.axis == dim:
        return source.segments
    whole = one_map(source, node)
    if whole is None:
        joint = joint_of(source)
        if joint is not None:
            raise RowsJoined(joint)
        return Stop(node, "unsupported_op", "columns from different sources along two axes")
    piece = whole.pieces[0]
    size = axis_size(piece.axes[dim])
    if not isinstance(size, int):
        return Stop(node, "token_mixing", "rows of several tensors are joined")
    return (Segment(0, size, piece),)


def _joinable(maps: Sequence[LinearMap], dim: int, rank: int) -> bool:
    """Whether ``dim`` holds features: it is the last axis, or some piece has columns of a weight there."""
    return dim == rank - 1 or any(
        p.weight is not None and any(a in p.weight.atoms for a in p.axes[dim]) for m in maps for p in m.pieces
    )


def cat(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    rank = len(shape(node))
    inputs = [x for x in args_of(node)[0] if len(shape(x)) == rank]  # torch lets empty 1-D tensors join anything
    dim = axis(argument(node, 1, "dim", 0), rank)
    if any(maps.is_weight(x) and _fill(x) is None for x in inputs):
        return Stop(node, "unsupported_op", "constants are joined to columns of a linear map")
    sources: list[LinearMap] = []
    for x in inputs:
        source = _map_of(maps, x)
        if isinstance(source, Stop):
            return Stop(node, "unsupported_op", "constants are joined to columns of a linear map")
        sources.append(source)
    if len(sources) == 1:
        return finish(sources[0], node)
    features = _joinable(sources, dim, rank)
    if not features:
        single = all(same(shape(x)[dim], 1) for x in inputs)
        joint = stacked([_one_or_segments(m, node) for m in sources], dim, node) if single else None
        return joint or Stop(node, "token_mixing", "rows of several tensors are joined")
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
    return finish(result, node)


def stack(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Maps of the same rows along a new axis (heads that were projected one by one)."""
    return _stack(maps, args_of(node)[0], axis(argument(node, 1, "dim", 0), len(shape(node))), node)


def _stack(maps: Maps, parts: Sequence[fx.Node], dim: int, node: fx.Node) -> LinearMap | Stop:
    elements: list[LinearMap] = []
    for x in parts:
        if maps.is_weight(x):
            return unexplained(node)
        source = _one_or_segments(maps.map(x), node)
        at = None if source.axis is None else source.axis + (source.axis >= dim)
        one = source.each(lambda p: replace(p, axes=(*p.axes[:dim], (), *p.axes[dim:])), at)
        assert isinstance(one, LinearMap)
        elements.append(one)
    return stacked(elements, dim, node) or unexplained(node)


def _one_or_segments(source: LinearMap, node: fx.Node) -> LinearMap:
    return one_map(source, node) or source


def copy(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """``copy(target, source)``: the source's values, broadcast to the target's shape."""
    x: Any = args_of(node)[1]
    if maps.is_weight(x) or not val(x).dtype.is_floating_point:
        return unexplained(node)
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return finish(broadcast_to(maps.map(x), shape(node), node), node)


def slice_scatter(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Columns ``start:end`` of the base replaced by another map."""
    base, x = args_of(node)[0], args_of(node)[1]
    rank = len(shape(node))
    dim = axis(argument(node, 2, "dim", 0), rank)
    size = shape(node)[dim]
    bounds = argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
    if maps.is_weight(x) or (maps.is_weight(base) and _fill(base) is None):
        return unexplained(node)
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    new, old = maps.map(x), _map_of(maps, base)
    if isinstance(old, Stop):
        return unexplained(node)
    if same(size, shape(x)[dim]):
        return finish(new, node)
    if not isinstance(size, int) or any(isinstance(b, fx.Node) for b in bounds) or not _joinable([new, old], dim, rank):
        return _overwritten(node)
    start, stop, step = slice(*bounds).indices(size)
    if step != 1:
        return Stop(node, "unsupported_op", "columns are interleaved")
    if start >= stop:
        return finish(old, node)
    base_segments, segments = _segments_of(old, dim, node), _segments_of(new, dim, node)
    if isinstance(base_segments, Stop):
        return base_segments
    if isinstance(segments, Stop):
        return segments
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
    return finish(result, node)


def pad(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    x, widths = args_of(node)[0], args_of(node)[1]
    mode = argument(node, 2, "mode", "constant") if packet(node) is aten.pad else "constant"
    value = argument(node, 3 if packet(node) is aten.pad else 2, "value", 0)
    if mode != "constant" or value not in (0, None) or any(not isinstance(w, int) for w in widths):
        return unexplained(node)
    before, after, *others = widths
    dim = len(shape(node)) - 1
    source = maps.map(x)
    segments = _segments_of(source, dim, node)
    if any(others) or before < 0 or after < 0 or isinstance(segments, Stop):
        return unexplained(node)
    zeros = [
        Segment(
            start, stop, Piece((*(fresh_axis(s) for s in shape(node)[:-1]), fresh_axis(stop - start)), val(node).dtype)
        )
        for start, stop in ((0, before), (before + segments[-1].stop, before + segments[-1].stop + after))
        if start < stop
    ]
    moved = [Segment(s.start + before, s.stop + before, s.piece) for s in segments]
    return finish(LinearMap(tuple(sorted(zeros + moved, key=lambda s: s.start)), dim), node)
