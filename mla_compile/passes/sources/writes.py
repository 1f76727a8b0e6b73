"""Writes into a buffer of full length: writes of K or V are redirected to a buffer of rows.

``K = index_copy(buffer, tokens, positions, k_new)`` holds at each position the value written last, or else the value of
the buffer. Over rows, this is ``index_copy(rows, tokens, positions, c_new)`` with the same positions. A write into a
part of the buffer, such as its first sequences, is the same write into that part of the rows. So is a write by
arithmetic with factors that all heads and columns share, such as ``buffer * (1 - one_hot) + k_new * one_hot``, whatever
the factors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_letters

import torch
from torch import fx

from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import args_of, argument, is_tensor, packet, shape, val
from mla_compile.passes.ir.operators import behind, decode, varying, whole_scatter
from mla_compile.passes.ir.sizes import Size, same, same_sizes
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.sources.along_tokens import (
    NEW,
    OLD,
    Applied,
    Dim,
    Indices,
    Mix,
    Shared,
    Writing,
    axes_of,
    moved,
)

aten = torch.ops.aten
_DEPTH = 8
"""How many operators one write may consist of, one upon the other."""


@dataclass(frozen=True)
class CacheWrite:
    """A write of new tokens into ``buffer`` that gives ``node``.

    ``made``: how it is made of both. ``grown``: the axes along which what is new is broadcast. ``stacked``: the axis
    along which ``parts``, each a new tensor without it, are stacked; otherwise there is one of them.
    """

    node: fx.Node
    buffer: fx.Node
    parts: tuple[fx.Node, ...]
    made: Writing
    grown: tuple[int, ...] = ()
    stacked: int | None = None

    @property
    def dims(self) -> list[int]:
        """The axes along which not all is treated alike; that of an inner part comes last."""
        return [*self.grown, *axes_of(self.made)]


def write_of(node: fx.Node, is_buffer: Callable[[fx.Node], bool]) -> CacheWrite | None:
    """Return ``node`` as a write of one tensor into one that ``is_buffer``; None if it does anything else.

    Several tensors count as one if they are written to the same places of each part of the buffer.
    """
    if isinstance(how := decode(node), moves.WriteOne) and how.index is not None:
        return _write_of_each(node, how.dim, is_buffer)
    buffer = _buffer_of(node, is_buffer)
    if buffer is None or buffer is node:
        return None
    reading = _Reading(buffer)
    made = reading.made(node)
    if made is None or len(reading.new) != 1:
        return None
    ((new, grown),) = reading.new.items()
    # A new tensor that is broadcast may be converted on the way.
    same_dtype = val(new).dtype == val(buffer).dtype == val(node).dtype
    return CacheWrite(node, buffer, (new,), made, tuple(sorted(grown))) if same_dtype else None


def _write_of_each(node: fx.Node, dim: int, is_buffer: Callable[[fx.Node], bool]) -> CacheWrite | None:
    """Return the same write into each position of axis ``dim`` of a buffer, such as ``kv[0]`` and ``kv[1]``."""
    put: dict[int, fx.Node] = {}
    chain = [node]
    while isinstance(how := decode(chain[-1]), moves.WriteOne) and how.dim == dim and how.index is not None:
        put.setdefault(how.index, how.x)  # the last write counts
        chain.append(how.base)
    buffer = chain[-1]
    if not is_buffer(buffer) or {*put} != {*range(len(put))} or not same(shape(buffer)[dim], len(put)):
        return None
    if _is_read_between(chain, dim):
        return None

    def is_part(index: int) -> Callable[[fx.Node], bool]:
        def of_buffer(x: fx.Node) -> bool:
            selected = decode(x)
            if not isinstance(selected, moves.Select) or (selected.dim, selected.index) != (dim, index):
                return False
            whole = selected.x
            while (
                isinstance(how := decode(whole), moves.WriteOne) and how.dim == dim and how.index not in (None, index)
            ):
                whole = how.base
            return whole is buffer

        return of_buffer

    writes = [write_of(put[k], is_part(k)) for k in range(len(put))]
    found = [w for w in writes if w is not None and w.stacked is None]
    first = found[0] if len(found) == len(put) else None
    if first is None or any(w.grown != first.grown for w in found):
        return None
    if any(w.made != first.made for w in found):  # each may have a mask of its own for the same positions
        equals = first_equals(node.graph)
        if len({moved(w.made, lambda axis: axis, equals.__getitem__) for w in found}) > 1:
            return None

    def outside(axis: int) -> int:
        return axis + (axis >= dim)

    made, grown = moved(first.made, outside, lambda n: n), tuple(map(outside, first.grown))
    return CacheWrite(node, buffer, tuple(w.parts[0] for w in found), made, grown, dim)


def _is_read_between(chain: Sequence[fx.Node], dim: int) -> bool:
    """Whether parts of a buffer are read before all are written, as layers read their own keys of all.

    ``chain``: the writes, last first, and the buffer. A part that is not written yet may be read, to write to it.
    """
    written: set[int | None] = set()
    for then, node in zip(chain[-3::-1], chain[-2:0:-1], strict=True):
        how = decode(node)
        assert isinstance(how, moves.WriteOne)
        written.add(how.index)
        for user in node.users:
            part = decode(user)
            unwritten = isinstance(part, moves.Select) and part.dim == dim and part.index not in {*written, None}
            if user is not then and not unwritten:
                return True
    return False


def rows_written(node: fx.Node) -> moves.WriteRows | None:
    """Return ``node`` as a write of one row for each position in a tensor."""
    how = decode(node)
    return how if isinstance(how, moves.WriteRows) and len(shape(how.index)) == 1 and _fits(how) else None


def is_zeros(node: fx.Node) -> bool:
    """Whether ``node`` starts a buffer of zeros."""
    how = decode(node)
    return isinstance(how, moves.Fill) and how.value == 0 and not isinstance(how.value, bool)


def _buffer_of(node: fx.Node, is_buffer: Callable[[fx.Node], bool], depth: int = _DEPTH) -> fx.Node | None:
    """Return the buffer that ``node`` shows in part or as a whole, with or without what is written to it."""
    if is_buffer(node):
        return node
    if depth:
        for n in _bases(node):
            if (found := _buffer_of(n, is_buffer, depth - 1)) is not None:
                return found
    return None


def _bases(node: fx.Node) -> list[fx.Node]:
    """Return the operands that may be the buffer to which ``node`` writes, or of which it is a part."""
    how = decode(node)
    if isinstance(how, (moves.Write, moves.WriteRows)):
        return [how.base]
    if isinstance(how, (moves.Slice, moves.Assign)):
        return [how.x]
    if packet(node) in (aten.index_put, aten.scatter):
        return [argument(node, 0, "self")]
    if node.target not in _ARITHMETIC:
        return []
    return [n for n in node.all_input_nodes if is_tensor(n) and same_sizes(shape(n), shape(node))]


class _Reading:
    """Reads how a tensor is made of a buffer and of ``new`` tensors that are written to it."""

    def __init__(self, buffer: fx.Node) -> None:
        self.buffer = buffer
        self.new: dict[fx.Node, set[int]] = {}

    def made(self, node: fx.Node) -> Writing | None:
        """Return how ``node``, which shows a buffer, is made; None if it is not made along tokens alone."""
        if node is self.buffer:
            return OLD
        how = decode(node)
        if isinstance(how, moves.Slice):
            x = self.made(how.x)
            whole = x is None or how.bounds is None
            return None if whole else Applied(aten.slice.Tensor, (x, Dim(how.dim), *(how.bounds or ())))
        if isinstance(how, moves.Assign):
            return self.made(how.x) if _is_kept(how.x, node) else None
        if isinstance(how, (moves.Write, moves.WriteRows)):
            return self._written(how, packet(node)) if _fits(how) else None
        if packet(node) in (aten.index_put, aten.scatter):
            return self._at_indices(node)
        rule = _ARITHMETIC.get(node.target)
        return None if rule is None or not _in_one_dtype(node) else rule(self, node)

    def shows(self, node: fx.Node) -> bool:
        """Whether ``node`` is a part of the buffer, or what it becomes by a write."""
        return _buffer_of(node, lambda n: n is self.buffer) is not None

    def part(self, node: object, of: fx.Node | None = None) -> Writing | None:
        """Return how an operand is made: of the buffer, or else as a new tensor that is written to it.

        ``of``: the result of an operator that broadcasts its operands.
        """
        if not is_tensor(node):
            return None
        if self.shows(node):
            return self.made(node) if of is None or same_sizes(shape(node), shape(of)) else None
        if of is not None and _is_spread(node):
            return _times(self, node)
        if of is not None and (mix := _mix(node)) is not None:
            rows, matrix, summed, dim = mix
            x = self.part(rows)
            return None if x is None else Mix(x, matrix, summed, dim)
        if of is not None:
            node = behind(node, moves.Expand)[-1]
        wide = shape(node if of is None else of)
        if len(wide) != len(shape(node)):
            return None
        self.new.setdefault(node, set()).update(k for k, n in enumerate(shape(node)) if not same(n, wide[k]))
        return NEW

    def _written(self, how: moves.Write | moves.WriteRows, op: Callable[..., object]) -> Writing | None:
        base, x = self.part(how.base), self.part(how.x)
        if base is None or x is None:
            return None
        if isinstance(how, moves.Write):
            return Applied(aten.slice_scatter.default, (base, x, Dim(how.dim), *how.bounds))
        if op is aten.index_put:
            return Applied(aten.index_put.default, (base, Indices(how.dim, (how.index,)), x))
        return Applied(aten.index_copy.default, (base, Dim(how.dim), how.index, x))

    def _at_indices(self, node: fx.Node) -> Writing | None:
        """Read a write at positions along several axes, such as one position for each sequence."""
        scatters = packet(node) is aten.scatter
        found = _scattered(node) if scatters else _by_pairs(node)
        base, x = self.part(argument(node, 0, "self")), self.part(argument(node, 3 if scatters else 2, "src"))
        if found is None or base is None or x is None:
            return None
        if isinstance(found, Indices):
            return Applied(aten.index_put.default, (base, found, x))
        dim, index = found
        return Applied(aten.scatter.src, (base, dim, Applied(aten.expand_as.default, (index, x)), x))


def _fits(how: moves.Write | moves.WriteRows) -> bool:
    """Whether a write has the buffer's shape except for its length along one axis, so that nothing is broadcast."""
    # One value that is broadcast over several positions could not be written as one row for each.
    length: Size = shape(how.x)[how.dim]
    if isinstance(how, moves.WriteRows):
        length = next(iter(shape(how.index)), 1)
    sizes = [*shape(how.base)[: how.dim], length, *shape(how.base)[how.dim + 1 :]]
    return same_sizes(sizes, shape(how.x))


def _by_pairs(node: fx.Node) -> Indices | None:
    """Return the positions of a write along several neighbouring axes, such as one position for each sequence."""
    if argument(node, 3, "accumulate", False):
        return None
    base, indices, new = (argument(node, k, name) for k, name in enumerate(("self", "indices", "values")))
    dims = [k for k, index in enumerate(indices) if index is not None]
    at = [indices[k] for k in dims]
    rank = len(dims)
    if rank < 2 or dims != [*range(dims[0], dims[0] + rank)]:
        return None
    # There are as many axes of positions as indexed axes, so `new` has the axes of the buffer.
    if any(len(shape(index)) != rank or val(index).dtype not in (torch.int64, torch.int32) for index in at):
        return None
    chosen = shape(new)[dims[0] : dims[0] + rank]
    fits = all(any(same_sizes([shape(i)[k]], [chosen[k]]) for i in at) for k in range(rank))
    sizes = [*shape(base)[: dims[0]], *chosen, *shape(base)[dims[0] + rank :]]
    return Indices(dims[0], tuple(at)) if fits and same_sizes(sizes, shape(new)) else None


def _scattered(node: fx.Node) -> tuple[Dim, Shared] | None:
    """Return the axis of a scatter that writes all of its source, and the positions along it."""
    scatter = whole_scatter(node)
    return None if scatter is None else (Dim(scatter[1]), _shared(scatter[2], node))


def _is_kept(x: fx.Node, node: fx.Node) -> bool:
    """Whether ``node``, which ``x`` is copied to, has the numbers of ``x`` as they are."""
    return same_sizes(shape(x), shape(node)) and val(x).dtype == val(node).dtype


def _in_one_dtype(node: fx.Node) -> bool:
    """Whether no operand that has the shape of the result is converted."""
    tensors = (n for n in node.all_input_nodes if is_tensor(n) and same_sizes(shape(n), shape(node)))
    return all(val(n).dtype in (val(node).dtype, torch.bool) for n in tensors)


def _shared(factor: fx.Node, node: fx.Node) -> Shared:
    """Return an operand of ``node`` with the axes along which it differs."""
    factor = behind(factor, moves.Expand)[-1]
    along, lead = varying(factor), len(shape(node)) - len(shape(factor))
    return Shared(factor, tuple(k + lead if k in along else None for k in range(len(shape(factor)))))


def _is_spread(node: fx.Node) -> bool:
    """Whether ``node`` multiplies a tensor by a factor along axes that the tensor does not have."""
    return node.target is aten.mul.Tensor and not any(
        not is_tensor(n) or same_sizes(shape(n), shape(node)) for n in args_of(node)
    )


def _mix(node: fx.Node) -> tuple[fx.Node, Shared, int, int] | None:
    """Return the tensor of which ``node`` sums tokens, the matrix of weights, its summed dimension, and the axis."""
    if node.target is aten.matmul.default:
        matrix, x = args_of(node)
        rank, own = len(shape(node)), len(shape(matrix))
        letters = ascii_letters[:rank]
        if len(shape(x)) != rank or not 1 < own <= rank:
            return None
        left, right, result = f"{letters[rank - own : -1]}Z", f"{letters[:-2]}Z{letters[-1]}", letters
    elif node.target is aten.einsum.default and len(args_of(node)[1]) == 2:
        inputs, _, result = str(args_of(node)[0]).replace(" ", "").partition("->")
        (left, right), (matrix, x) = inputs.split(","), args_of(node)[1]
        if len(right) < len(left):
            left, right, matrix, x = right, left, x, matrix
    else:
        return None
    gone = [k for k, (a, b) in enumerate(zip(right, result, strict=False)) if a != b]
    if len(right) != len(result) or len(gone) != 1 or len({*left}) < len(left) or not (left + right).isalpha():
        return None
    dim, summed = gone[0], left.find(right[gone[0]])
    if summed < 0 or result[dim] not in left or {*left} - {*result} != {right[dim]}:
        return None
    along = varying(matrix)
    axes = (result.index(a) if a in result and (k in along or a == result[dim]) else None for k, a in enumerate(left))
    return x, Shared(matrix, tuple(axes)), summed, dim


def _times(reading: _Reading, node: fx.Node) -> Writing | None:
    x, factor = args_of(node)
    if isinstance(factor, (int, float)):
        return _step(node, reading.part(x, node), factor)
    if not is_tensor(factor):
        return None
    if reading.shows(factor) or (not reading.shows(x) and len(varying(factor)) > len(varying(x))):
        x, factor = factor, x
    return _step(node, reading.part(x, node), _shared(factor, node))


def _sum(reading: _Reading, node: fx.Node) -> Writing | None:
    x, y = args_of(node)[:2]
    return None if node.kwargs.get("alpha", 1) != 1 else _step(node, reading.part(x, node), reading.part(y, node))


def _choice(reading: _Reading, node: fx.Node) -> Writing | None:
    mask, x, y = args_of(node)
    return _step(node, _shared(mask, node), reading.part(x, node), reading.part(y, node))


def _between(reading: _Reading, node: fx.Node) -> Writing | None:
    x, y, weight = args_of(node)
    return _step(node, reading.part(x, node), reading.part(y, node), _shared(weight, node))


def _emptied(reading: _Reading, node: fx.Node) -> Writing | None:
    x, mask, value = args_of(node)
    return _step(node, reading.part(x, node), _shared(mask, node), value) if value == 0 else None


def _step(node: fx.Node, *args: object) -> Writing | None:
    return None if any(a is None for a in args) else Applied(node.target, args)  # type: ignore[arg-type]


_ARITHMETIC: dict[object, Callable[[_Reading, fx.Node], Writing | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum),
    aten.mul.Tensor: _times,
    aten.where.self: _choice,
    aten.lerp.Tensor: _between,
    aten.masked_fill.Scalar: _emptied,
}
"""Operators that are linear in tensors of all heads and columns, and what they read."""
