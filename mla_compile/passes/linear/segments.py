"""Transfer rules for operators that slice a tensor or assemble a tensor from parts.

If X is a linear map of rows, some columns of X are a linear map of the same rows. Some tokens of X are not. A tensor
that is assembled along its features becomes a list of segments, each with its own source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, axis_size, fresh_axis
from mla_compile.passes.ir.expr import Factor
from mla_compile.passes.ir.factors import part_of
from mla_compile.passes.ir.graph import args_of, shape, val
from mla_compile.passes.ir.moves import Along, Assign, Fill, Join, Select, Slice, Stack, Write, WriteOne
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same, same_sizes
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
from mla_compile.passes.linear.rows import zeros_around
from mla_compile.passes.linear.stops import unexplained

aten = torch.ops.aten


def part(source: LinearMap, dim: int, taken: range, node: fx.Node) -> LinearMap | Stop:
    """Take the positions ``taken`` of axis ``dim``."""
    # A stride may run across the segments (interleaved rotary columns). In a single map, a stride only slices the
    # weight.
    if source.axis == dim and taken.step != 1:
        source = one_map(source, node) or source
    if source.axis != dim:
        return source.each(lambda p: _part_of_piece(p, dim, taken, node))
    if taken.step != 1:
        return Stop(node, "unsupported_op", "a strided slice across columns from different sources")
    kept = within(source.segments, dim, taken, node)
    if isinstance(kept, Stop):
        return kept
    return _in_a_row([s.moved(-taken.start) for s in kept], dim, node)


def within(segments: Sequence[Segment], dim: int, taken: range, node: fx.Node) -> Sequence[Segment] | Stop:
    """Return the parts of the segments that lie in the columns ``taken``, at their old positions."""
    kept: list[Segment] = []
    for s in segments:
        low, high = max(taken.start, s.start), min(taken.stop, s.stop)
        if low < high:
            cut = range(low - s.start, high - s.start)
            piece = s.piece.each(partial(_part_of_piece, dim=dim, taken=cut, node=node))
            if isinstance(piece, Stop):
                return piece
            kept.append(Segment(low, high, piece))
    return kept


def _part_of_piece(piece: Piece, dim: int, taken: range, node: fx.Node) -> Piece | Stop:
    own = piece.axes[dim]
    if taken.step == 1 and taken.start == 0 and same(axis_size(own), taken.stop):
        return piece
    # Some tokens of X are a linear map of a slice of the source. `rows.py` handles such slices.
    if any(a in piece.source_atoms for a in own):
        return Stop(node, "unsupported_op", "only a part of the rows is read")
    atom = Atom(len(taken))
    # An axis of size 1 has no atom, neither in `axes` nor in the factors.
    axes = tuple(() if k == dim and atom.size == 1 else (atom,) if k == dim else a for k, a in enumerate(piece.axes))

    def narrow(f: Factor | None) -> Factor | Stop | None:
        if f is None or not any(a in f.atoms for a in own):
            return f
        # The weight has only some atoms of the axis, so the range does not correspond to a range of the weight.
        if not all(a in f.atoms for a in own):
            return Stop(node, "unsupported_op", "a slice across a broadcast axis")
        return part_of(f, own, atom, taken)

    weight, bias = narrow(piece.weight), narrow(piece.bias)
    if isinstance(weight, Stop):
        return weight
    if isinstance(bias, Stop):
        return bias
    return replace(piece, axes=axes, weight=weight, bias=bias)


def sliced(maps: Maps, node: fx.Node, how: Slice) -> LinearMap | Stop:
    if same(shape(how.x)[how.dim], shape(node)[how.dim]):
        return finish(maps.map(how.x), node)
    if how.taken is None:
        return Stop(node, "unsupported_op", "only a part of the rows is read")
    return finish(part(maps.map(how.x), how.dim, how.taken, node), node)


def selected(maps: Maps, node: fx.Node, how: Select) -> LinearMap | Stop:
    x = how.x
    # If heads were written into one buffer, find the write of the selected position.
    while how.index is not None and (write := _write(x, how.dim)) is not None:
        if write.index == how.index:
            return unexplained(maps, node) if maps.is_weight(write.x) else finish(maps.map(write.x), node)
        x = write.base
    source = _map_of(maps, x)
    return source if isinstance(source, Stop) else finish(_select(source, how.dim, how.index, node), node)


def _write(node: fx.Node, dim: int) -> WriteOne | None:
    """Return ``node`` as a write to a known position of axis ``dim``; None if ``node`` is anything else."""
    # If sizes are symbolic, slices of the whole tensor lie between the writes.
    node = _itself(node)
    write = decode(node)
    if not isinstance(write, WriteOne) or write.index is None or val(write.x).dtype != val(node).dtype:
        return None
    return write if write.dim == dim else None


def _itself(node: fx.Node) -> fx.Node:
    """Skip slices and writes of the whole tensor. They are traced for ``x[:, :]`` if sizes are symbolic."""
    while isinstance(how := decode(node), (Slice, Write)):
        if val(how.x).dtype != val(node).dtype or not same_sizes(shape(how.x), shape(node)):
            return node
        node = how.x
    return node


def written_one(maps: Maps, node: fx.Node, how: WriteOne) -> LinearMap | Stop:
    """Return the map of a tensor into which heads were written one by one. Together, these heads are a stack.

    ``node`` is the last of the writes.
    """
    written: dict[int, fx.Node] = {}
    current = node
    while (write := _write(current, how.dim)) is not None:
        assert write.index is not None
        # The walk goes upstream, so the first write found for a position is the last write in the program.
        written.setdefault(write.index, write.x)
        if len(written) == shape(node)[how.dim]:
            return stacked_up(maps, node, Stack(tuple(written[k] for k in range(len(written))), how.dim))
        current = write.base
    return _overwritten(node)


def _select(source: LinearMap, dim: int, index: int | None, node: fx.Node) -> LinearMap | Stop:
    if index is None:
        return Stop(node, "unsupported_op", "one row is selected")
    one = part(source, dim, range(index, index + 1), node)
    if isinstance(one, Stop):
        return one
    at = None if one.axis is None else one.axis - (one.axis > dim)
    return one.each(lambda p: replace(p, axes=p.axes[:dim] + p.axes[dim + 1 :]), at)


def _fill(node: fx.Node) -> Fill | None:
    """Return the fill that made ``node`` or the tensor that ``node`` slices; None if there is no fill."""
    while isinstance(how := decode(node), (Slice, Select)):
        node = how.x
    return how if isinstance(how, Fill) else None


def _overwritten(node: fx.Node) -> Stop:
    """Return the reason why a write ends the walk.

    A write into a filled tensor may write heads, so the reason is not token mixing.
    """
    base = node
    while isinstance(how := decode(base), (Slice, Write, WriteOne)):
        base = how.x if isinstance(how, Slice) else how.base
    if isinstance(how, Fill):
        return Stop(node, "unsupported_op", "a tensor is assembled from parts")
    return Stop(node, "token_mixing", "rows of another tensor are overwritten")


def filled(maps: Maps, node: fx.Node, how: Fill) -> LinearMap | Stop:
    """Return the map of a tensor of zeros, or of an uninitialized tensor."""
    if how.value not in (0, None):
        return unexplained(maps, node)
    axes = tuple(fresh_axis(s) for s in shape(node))
    # `empty` is treated as zeros that will be overwritten. Parts that are not overwritten keep `defined=False` and are
    # refused later.
    return LinearMap.single(Piece(axes, val(node).dtype, defined=how.value is not None).visited(node))


def _map_of(maps: Maps, x: fx.Node) -> LinearMap | Stop:
    """Return the map of an operand, which may also be a constant tensor of zeros or an uninitialized tensor."""
    if not maps.is_weight(x):
        return maps.map(x)
    fill = _fill(x)
    return unexplained(maps, x) if fill is None else filled(maps, x, fill)


def _segments_of(source: LinearMap, dim: int, node: fx.Node) -> tuple[Segment, ...] | Stop:
    """Return ``source`` as segments along ``dim``."""
    if source.axis == dim:
        return source.segments
    whole = one_map(source, node)
    if whole is None:
        joint = joint_of(source)
        if joint is not None:
            raise RowsJoined(joint)
        return Stop(node, "unsupported_op", "columns from different sources along two axes")
    piece = whole.segments[0].piece
    # Segments have fixed bounds, so an axis of unknown length cannot be segmented.
    size = axis_size(piece.axes[dim])
    if not isinstance(size, int):
        return Stop(node, "token_mixing", "rows of several tensors are joined")
    return (Segment(0, size, piece),)


def _joinable(maps: Sequence[LinearMap], dim: int, rank: int) -> bool:
    """Whether ``dim`` holds features: it is the last axis, or the weight of some piece varies along it."""
    return dim == rank - 1 or any(
        p.weight is not None and any(a in p.weight.atoms for a in p.axes[dim]) for m in maps for p in m.pieces
    )


def joined(maps: Maps, node: fx.Node, how: Join) -> LinearMap | Stop:
    dim = how.dim
    parts = [_map_of(maps, x) for x in how.parts]
    sources = [part for part in parts if not isinstance(part, Stop)]
    if len(sources) < len(parts):
        what = "columns" if _joinable(sources, dim, len(shape(node))) else "rows"
        return Stop(node, "unsupported_op", f"constants are joined to {what} of a linear map")
    if len(sources) == 1:
        return finish(sources[0], node)
    if not _joinable(sources, dim, len(shape(node))):
        # If each tensor has one head, joining along the axis of heads is a stack.
        single = all(same(shape(x)[dim], 1) for x in how.parts)
        joint = stacked([one_map(m, node) or m for m in sources], dim, node) if single else None
        return joint or Stop(node, "token_mixing", "rows of several tensors are joined")
    return _assembled(node, how, dict(zip(how.parts, sources, strict=True)))


def _assembled(node: fx.Node, how: Along, sources: Mapping[fx.Node, LinearMap]) -> LinearMap | Stop:
    """Put columns of the maps of several tensors side by side."""
    if how.axis_parts is None:
        return Stop(node, "token_mixing", "rows of several tensors are joined")
    row: list[Segment] = []
    for part in how.axis_parts:
        segments = _segments_of(sources[part.node], part.dim, node)
        taken = range(part.offset, part.offset + part.stop - part.start)
        kept = segments if isinstance(segments, Stop) else within(segments, part.dim, taken, node)
        if isinstance(kept, Stop):
            return kept
        row += [s.moved(part.start - part.offset) for s in kept]
    return finish(_in_a_row(row, how.dim, node), node)


def _in_a_row(segments: Sequence[Segment], dim: int, node: fx.Node) -> LinearMap | Stop:
    if not segments:
        return Stop(node, "unsupported_op", "an empty slice")
    return LinearMap(tuple(segments), dim) if len(segments) > 1 else LinearMap.single(segments[0].piece)


def stacked_up(maps: Maps, node: fx.Node, how: Stack) -> LinearMap | Stop:
    """Join maps of the same rows along a new axis. Such maps are heads that were projected one by one."""
    dim = how.dim
    elements: list[LinearMap] = []
    for x in how.parts:
        if maps.is_weight(x):
            return unexplained(maps, node)
        source = maps.map(x)
        source = one_map(source, node) or source
        at = None if source.axis is None else source.axis + (source.axis >= dim)
        one = source.each(lambda p: replace(p, axes=(*p.axes[:dim], (), *p.axes[dim:])), at)
        assert isinstance(one, LinearMap)
        elements.append(one)
    if len(elements) == 1:  # the new axis has no atom
        return finish(elements[0], node)
    return stacked(elements, dim, node) or unexplained(maps, node)


def assigned(maps: Maps, node: fx.Node, how: Assign) -> LinearMap | Stop:
    """Return the map of the assigned values, broadcast to the shape of the target."""
    if maps.is_weight(how.x) or not val(how.x).dtype.is_floating_point:
        return unexplained(maps, node)
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    return finish(broadcast_to(maps.map(how.x), shape(node)), node)


def written(maps: Maps, node: fx.Node, how: Write) -> LinearMap | Stop:
    """Return the map of a tensor in which another tensor replaced some columns."""
    base, x, dim = how.base, how.x, how.dim
    if maps.is_weight(x):
        return unexplained(maps, node)
    if quantizes(val(node).dtype):
        return Stop(node, "nonlinear", f"conversion to {val(node).dtype}")
    new, old = maps.map(x), _map_of(maps, base)
    if isinstance(old, Stop):
        return unexplained(maps, node)
    if same(shape(node)[dim], shape(x)[dim]):
        return finish(new, node)
    if how.taken is None or not _joinable([new, old], dim, len(shape(node))):
        return _overwritten(node)
    if how.taken.step != 1:
        return Stop(node, "unsupported_op", "columns are interleaved")
    return _assembled(node, how, {base: old, x: new})


def pad(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of a pad that adds zero columns. Zeros along another axis are rows and need virtual sources."""
    padding = zeros_around(node)
    source = maps.map(args_of(node)[0])
    dim = len(shape(node)) - 1
    segments = _segments_of(source, dim, node)
    if padding is None or isinstance(segments, Stop):
        return unexplained(maps, node)
    if any(widths != (0, 0) for widths in padding[:-1]):
        return Stop(node, "unsupported_op", "zero rows are joined to rows of a linear map")
    before, after = padding[-1]
    zeros = [
        Segment(
            start, stop, Piece((*(fresh_axis(s) for s in shape(node)[:-1]), fresh_axis(stop - start)), val(node).dtype)
        )
        for start, stop in ((0, before), (before + segments[-1].stop, before + segments[-1].stop + after))
        if start < stop
    ]
    row = sorted([*zeros, *(s.moved(before) for s in segments)], key=lambda s: s.start)
    return finish(LinearMap(tuple(row), dim), node)
