"""Find writes of K or V into a full-length buffer, if writes into a buffer of rows can replace them.

``K = index_copy(buffer, tokens, positions, k_new)`` holds the new value at each written position, and the value of the
buffer everywhere else. For rows, the write is ``index_copy(rows, tokens, positions, c_new)``. A write into a slice of
the buffer (the first batch entries, for example) becomes a write into this slice of the rows. A moving window,
``cat([buffer[:, 1:], k_new])``, can also be applied to rows. So can arithmetic with factors that all heads and columns
share, such as ``buffer * (1 - one_hot) + k_new * one_hot``. The factors may have any values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import torch
from torch import fx

from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.operators import behind, decode, whole_scatter
from mla_compile.passes.ir.sizes import Size, same, same_sizes
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.sources.along_tokens import (
    OLD,
    Applied,
    Dim,
    Given,
    Indices,
    Mix,
    Shared,
    Writing,
    axes_of,
    moved,
    with_given,
)
from mla_compile.passes.sources.selections import NO_PARTS, Parts, Selected, parts_of, place_of
from mla_compile.passes.sources.write_arithmetic import ARITHMETIC, is_in_one_dtype
from mla_compile.passes.sources.write_operands import is_spread, mix_of, shared, times_number

aten = torch.ops.aten
_DEPTH = 8
"""The longest chain of operators that is read as one write."""


@dataclass(frozen=True)
class CacheWrite:
    """A write of new tokens into ``buffer``. The result of the write is ``node``.

    ``new``: the new tensors, each as a tuple of parts to stack along the axes ``stacked`` (or one part if there are no
    such axes). ``made``: how ``node`` is made from the buffer and the new tensors. ``grown``: the axes along which new
    tensors are broadcast. ``apart``: the parts of ``node``, if the model writes them one by one.
    """

    node: fx.Node
    buffer: fx.Node
    new: tuple[tuple[fx.Node, ...], ...]
    made: Writing
    grown: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    apart: Parts = NO_PARTS

    @property
    def parts(self) -> list[fx.Node]:
        """The parts of all new tensors."""
        return [part for one in self.new for part in one]

    @property
    def dims(self) -> list[int]:
        """The axes along which values are moved, broadcast or multiplied; axes of inner operators come last."""
        return [*self.grown, *axes_of(self.made)]

    def outer(self, axis: int) -> int:
        """Return the axis of the buffer that corresponds to ``axis`` of a part."""
        for k in sorted(self.stacked):
            axis += axis >= k
        return axis

    def inner(self, axis: int) -> int:
        """Return the axis of a part that corresponds to ``axis`` of the buffer."""
        return axis - sum(k < axis for k in self.stacked)


def write_of(node: fx.Node, is_buffer: Callable[[fx.Node], bool]) -> CacheWrite | None:
    """Return a record of the write that makes ``node`` from a buffer; None if there is no such write.

    ``is_buffer``: whether a tensor may be the buffer. Equal writes into all parts of a buffer, such as ``kv[0]`` and
    ``kv[1]``, become one record.
    """
    if isinstance(how := decode(node), moves.WriteOne) and how.index is not None:
        return _write_of_each(node, is_buffer)
    buffer = _buffer_of(node, is_buffer)
    if buffer is None or buffer is node or not same_sizes(shape(buffer), shape(node)):
        return None
    reading = _Reading(buffer)
    made = reading.made(node)
    if made is None or not reading.new:
        return None
    along = frozenset(axes_of(made)), frozenset(axes_of(made, factors=False))
    # A tensor times a number is itself an image of rows, so it can be a new tensor. The number is recorded separately
    # only if this leaves fewer new tensors.
    new, given = min((_merged(reading.new, *along, numbers=n) for n in (False, True)), key=lambda one: len(one[0]))
    grown = tuple(sorted({k for axes in new.values() for k in axes}))
    # An operator that broadcasts a new tensor may also convert the dtype, which rules out a write.
    if {val(n).dtype for n in (buffer, node, *new)} != {val(node).dtype}:
        return None
    return CacheWrite(node, buffer, tuple((n,) for n in new), with_given(made, [OLD, *given]), grown)


def _merged(
    read: Mapping[fx.Node, Collection[int]], along: Collection[int], moved_along: Collection[int], *, numbers: bool
) -> tuple[dict[fx.Node, set[int]], list[Writing]]:
    """Find the tensors from which the tensors in ``read`` are made.

    Return the found tensors with their broadcast axes, and a record for each tensor in ``read``. The search looks
    through slices along the axes ``along`` and joins along the axes ``moved_along``. If ``numbers`` is set, the search
    also looks through products with a number.
    """
    new: dict[fx.Node, set[int]] = {}

    def made(node: fx.Node, grown: Collection[int]) -> Writing:
        how = decode(node)
        if numbers and (x := times_number(node)) is not None:
            return Applied(node.target, (made(x, grown), *args_of(node)[1:]))  # type: ignore[arg-type]
        if isinstance(how, moves.Slice) and how.dim in along and how.bounds is not None:
            return Applied(aten.slice.Tensor, (made(how.x, grown), Dim(how.dim), *how.bounds))
        if isinstance(how, moves.Join) and how.dim in moved_along:
            return Applied(aten.cat.default, (tuple(made(part, grown) for part in how.parts), Dim(how.dim)))
        new.setdefault(node, set()).update(grown)
        return Given(1 + [*new].index(node))

    return new, [made(node, grown) for node, grown in read.items()]


def _write_of_each(node: fx.Node, is_buffer: Callable[[fx.Node], bool]) -> CacheWrite | None:
    """Return one record for equal writes into all parts of a buffer (``kv[0]`` and ``kv[1]``); None for other nodes."""
    written = parts_of(node)
    axes, chain, lengths = written.axes, written.chain, [shape(node)[k] for k in written.axes]
    first = _buffer_of(written.nodes[0], lambda n: is_buffer(place_of(n).node))
    if not axes or first is None:
        return None
    buffer = place_of(first).node
    places = [Selected(buffer, tuple(sorted(zip(axes, at, strict=True)))) for at in product(*map(range, lengths))]
    apart = dict(zip(places, written.nodes, strict=True))
    if not all(_are_read_apart(n, chain, apart, whole=n in (buffer, node)) for n in (buffer, *chain)):
        return None

    def is_part(place: Selected) -> Callable[[fx.Node], bool]:
        return lambda n: place_of(n) == place

    found = [w for place, n in apart.items() if (w := write_of(n, is_part(place))) is not None]
    if len(found) < len(apart) or any(w.stacked or w.grown != found[0].grown for w in found):
        return None
    made = found[0].made
    if any(w.made != made for w in found):  # each write may compute its own mask of the same positions
        equals = first_equals(node.graph)
        if len({moved(w.made, lambda axis: axis, equals.__getitem__) for w in found}) > 1:
            return None
    new = tuple(zip(*(map(itemgetter(0), w.new) for w in found), strict=True))
    whole = CacheWrite(node, buffer, new, made, (), axes, written)
    grown = tuple(map(whole.outer, found[0].grown))
    return replace(whole, made=moved(made, whole.outer, lambda n: n), grown=grown)


def _are_read_apart(
    node: fx.Node, chain: Collection[fx.Node], parts: Mapping[Selected, fx.Node], *, whole: bool = False
) -> bool:
    """Whether each reader of ``node`` selects either an already written part, or a part that is overwritten next.

    ``whole``: whether ``node`` may also have other readers. ``chain``: the buffer after each write of a part.
    ``parts``: maps each place to the written part.
    """
    for user in node.users:
        if user in chain or user.op == "output":
            continue
        place = place_of(user)
        if not isinstance(decode(user), moves.Select):
            apart = whole
        elif (written := parts.get(place)) is not None:
            apart = _is_read_to_write(user, written)
        else:
            apart = (not place.at and place.node in parts.values()) or _are_read_apart(user, chain, parts)
        if not apart:
            return False
    return True


def _is_read_to_write(part: fx.Node, written: fx.Node) -> bool:
    """Whether every reader of ``part`` helps to make ``written`` or reads a size."""
    return all(
        user is written
        or packet(user) is aten.sym_size
        or (_buffer_of(user, lambda n: n is part) is not None and _is_read_to_write(user, written))
        for user in part.users
    )


def rows_written(node: fx.Node) -> moves.WriteRows | None:
    """Return the record of ``node`` if it writes one row to each position in a tensor; otherwise None."""
    how = decode(node)
    return how if isinstance(how, moves.WriteRows) and len(shape(how.index)) == 1 and _fits(how) else None


def is_zeros(node: fx.Node) -> bool:
    """Whether ``node`` is a new tensor of zeros, such as an empty buffer."""
    how = decode(node)
    return isinstance(how, moves.Fill) and how.value == 0 and not isinstance(how.value, bool)


def _buffer_of(node: fx.Node, is_buffer: Callable[[fx.Node], bool], depth: int = _DEPTH) -> fx.Node | None:
    """Return the buffer from which writes and slices make ``node``; None if there is none."""
    if is_buffer(node):
        return node
    if depth:
        for n in _bases(node):
            if (found := _buffer_of(n, is_buffer, depth - 1)) is not None:
                return found
    return None


def _bases(node: fx.Node) -> list[fx.Node]:
    """Return the operands that may be the buffer, because ``node`` writes to them or takes a slice of them."""
    how = decode(node)
    if isinstance(how, (moves.Write, moves.WriteRows)):
        return [how.base]
    if isinstance(how, (moves.Slice, moves.Assign, moves.Copy)):
        return [how.x]
    if isinstance(how, moves.Join):
        return [*how.parts]
    if packet(node) is aten.roll:
        return [args_of(node)[0]]
    if packet(node) in _AT_POSITIONS:
        return [argument(node, 0, "self")]
    if node.target not in ARITHMETIC:
        return []
    return [n for n in node.all_input_nodes if is_tensor(n) and same_sizes(shape(n), shape(node))]


class _Reading:
    """Finds how a tensor is made from a buffer and new tensors.

    ``new``: maps each new tensor to the axes along which the tensor is broadcast.
    """

    def __init__(self, buffer: fx.Node) -> None:
        self.buffer = buffer
        self.new: dict[fx.Node, set[int]] = {}

    def made(self, node: fx.Node) -> Writing | None:
        """Return a record of how writes make ``node``, the buffer or a slice of it; None if there is no such record."""
        if node is self.buffer:
            return OLD
        how = decode(node)
        if isinstance(how, moves.Slice):
            x = self.made(how.x)
            whole = x is None or how.bounds is None
            return None if whole else Applied(aten.slice.Tensor, (x, Dim(how.dim), *(how.bounds or ())))
        if isinstance(how, (moves.Assign, moves.Copy)):
            return self.made(how.x) if _is_kept(how.x, node) else None
        if isinstance(how, moves.Join):
            parts = tuple(map(self.part, how.parts))
            return None if None in parts else Applied(aten.cat.default, (parts, Dim(how.dim)))
        if packet(node) is aten.roll:
            return self._rolled(*args_of(node))
        if isinstance(how, (moves.Write, moves.WriteRows)):
            return self._written(how, packet(node)) if _fits(how) else None
        if packet(node) in _AT_POSITIONS:
            return self._at_indices(node)
        rule = ARITHMETIC.get(node.target)
        return None if rule is None or not is_in_one_dtype(node) else rule(self, node)

    def shows(self, node: fx.Node) -> bool:
        """Whether ``node`` is the buffer or a slice of the buffer, perhaps after writes."""
        return _buffer_of(node, lambda n: n is self.buffer) is not None

    def part(self, node: object, of: fx.Node | None = None) -> Writing | None:
        """Return a record of how the operand ``node`` is made from the buffer, or add ``node`` to the new tensors.

        ``of``: the operator that reads ``node``, if this operator broadcasts operands.
        """
        if not is_tensor(node):
            return None
        if self.shows(node):
            return self.made(node) if of is None or same_sizes(shape(node), shape(of)) else None
        if of is not None and is_spread(node):
            return ARITHMETIC[node.target](self, node)
        if of is not None and (mix := mix_of(node)) is not None:
            rows, matrix, summed, dim = mix
            x = self.part(rows)
            return None if x is None else Mix(x, matrix, summed, dim)
        if of is not None:
            node = behind(node, moves.Expand)[-1]
        wide = shape(node if of is None else of)
        if len(wide) != len(shape(node)):
            return None
        grown = (k for k, n in enumerate(shape(node)) if not same(n, wide[k]))
        self.new.setdefault(node, set()).update(grown)
        return Given(1 + [*self.new].index(node))

    def _written(self, how: moves.Write | moves.WriteRows, op: Callable[..., object]) -> Writing | None:
        base, x = self.part(how.base), self.part(how.x)
        if base is None or x is None:
            return None
        if isinstance(how, moves.Write):
            return Applied(aten.slice_scatter.default, (base, x, Dim(how.dim), *how.bounds))
        if op is aten.index_put:
            return Applied(aten.index_put.default, (base, Indices(how.dim, (how.index,)), x))
        return Applied(aten.index_copy.default, (base, Dim(how.dim), how.index, x))

    def _rolled(self, x: fx.Node, shifts: Sequence[object], dims: Sequence[int] = ()) -> Writing | None:
        made = self.made(x)
        if made is None or len(dims) != 1:  # without an axis, torch rolls the flattened tensor
            return None
        return Applied(aten.roll.default, (made, tuple(shifts), (Dim(axis(dims[0], len(shape(x)))),)))

    def _at_indices(self, node: fx.Node) -> Writing | None:
        """Return a record of ``node``, an operator that writes at given positions, such as one per batch entry."""
        op = packet(node)
        found = _AT_POSITIONS[op](node)
        base, x = (
            self.part(argument(node, 0, "self")),
            self.part(argument(node, 2 if op is aten.index_put else 3, "src")),
        )
        if found is None or base is None or x is None:
            return None
        if isinstance(found, Indices):
            added = (True,) if argument(node, 3, "accumulate", False) else ()
            return Applied(aten.index_put.default, (base, found, x, *added))
        dim, index = found
        if isinstance(index, fx.Node):
            return Applied(aten.index_add.default, (base, dim, index, x))
        return Applied(aten.scatter.src, (base, dim, Applied(aten.expand_as.default, (index, x)), x))


def _fits(how: moves.Write | moves.WriteRows) -> bool:
    """Whether the written tensor has the buffer's shape except along one axis, so that nothing is broadcast."""
    # A value that is broadcast over several positions does not have one row for each position.
    length: Size = shape(how.x)[how.dim]
    if isinstance(how, moves.WriteRows):
        length = next(iter(shape(how.index)), 1)
    sizes = [*shape(how.base)[: how.dim], length, *shape(how.base)[how.dim + 1 :]]
    return same_sizes(sizes, shape(how.x))


def _by_pairs(node: fx.Node) -> Indices | None:
    """Return the positions of an ``index_put`` along neighbouring axes, such as one position for each batch entry.

    Return None if an operand is broadcast, if the positions are not integers, or if the axes are not neighbours.
    """
    base, indices, new = (argument(node, k, name) for k, name in enumerate(("self", "indices", "values")))
    dims = [k for k, index in enumerate(indices) if index is not None]
    at = [indices[k] for k in dims]
    rank = len(dims)
    if not rank or dims != [*range(dims[0], dims[0] + rank)]:
        return None
    # Each index tensor has as many axes as the buffer has indexed axes. So `new` has as many axes as the buffer.
    if any(len(shape(index)) != rank or val(index).dtype not in (torch.int64, torch.int32) for index in at):
        return None
    chosen = shape(new)[dims[0] : dims[0] + rank]
    fits = all(any(same_sizes([shape(i)[k]], [chosen[k]]) for i in at) for k in range(rank))
    sizes = [*shape(base)[: dims[0]], *chosen, *shape(base)[dims[0] + rank :]]
    return Indices(dims[0], tuple(at)) if fits and same_sizes(sizes, shape(new)) else None


def _scattered(node: fx.Node) -> tuple[Dim, Shared] | None:
    """Return the axis and the positions of a scatter that writes its whole source; None for other scatters."""
    scatter = whole_scatter(node)
    return None if scatter is None else (Dim(scatter[1]), shared(scatter[2], node))


def _added(node: fx.Node) -> tuple[Dim, fx.Node] | None:
    """Return the axis and the positions of an ``index_add`` that adds whole rows; None for other additions."""
    base, dim, index, x = args_of(node)[:4]
    how = moves.WriteRows(base, x, axis(dim, len(shape(node))), index)
    whole = len(shape(index)) == 1 and node.kwargs.get("alpha", 1) == 1 and _fits(how)
    return (Dim(how.dim), index) if whole else None


_AT_POSITIONS: dict[object, Callable[[fx.Node], Indices | tuple[Dim, Shared] | tuple[Dim, fx.Node] | None]] = {
    aten.index_put: _by_pairs,
    aten.scatter: _scattered,
    aten.index_add: _added,
}
"""Operators that write at positions, in addition to those that :func:`decode` reads."""


def _is_kept(x: fx.Node, node: fx.Node) -> bool:
    """Whether ``node``, a copy of ``x``, has the shape and dtype of ``x``."""
    return same_sizes(shape(x), shape(node)) and val(x).dtype == val(node).dtype
