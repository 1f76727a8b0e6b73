"""Writes into a buffer of full length: writes of K or V are redirected to a buffer of rows.

``K = index_copy(buffer, tokens, positions, k_new)`` holds at each position the value written last, or else the value of
the buffer. Over rows, this is ``index_copy(rows, tokens, positions, c_new)`` with the same positions. A write into a
part of the buffer, such as its first sequences, is the same write into that part of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.core.program import view_source
from mla_compile.passes.cache.recipe import Call
from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import argument, packet, shape, val
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class WriteStep:
    """One operator of a write, along axis ``dim``; ``at``: the bounds of a slice, or the positions.

    Several tensors of positions index as many axes, from ``dim`` on.
    """

    op: object
    dim: int
    at: tuple[Hashable, ...]

    @property
    def dims(self) -> range:
        """The axes along which the step chooses positions."""
        return range(self.dim, self.dim + (len(self.at) if self.op is aten.index_put else 1))


@dataclass(frozen=True)
class CacheWrite:
    """A write of ``new`` into ``buffer``: the last of ``steps`` writes into the part that earlier steps select."""

    node: fx.Node
    buffer: fx.Node
    new: fx.Node
    steps: tuple[WriteStep, ...]

    def along(self, axis: Callable[[int], int]) -> tuple[WriteStep, ...]:
        """Return the same steps along the axes ``axis(dim)`` of another tensor."""
        return tuple(WriteStep(step.op, axis(step.dim), step.at) for step in self.steps)


def write_over(steps: tuple[WriteStep, ...], call: Call[fx.Node], buffer: fx.Node, new: fx.Node) -> fx.Node:
    """Write ``new`` into ``buffer``."""
    first, *inner = steps
    result: fx.Node
    if first.op is aten.index_copy:
        result = call(aten.index_copy.default, buffer, first.dim, first.at[0], new)
    elif first.op is aten.index_put:
        result = call(aten.index_put.default, buffer, [*[None] * first.dim, *first.at], new)
    else:
        if inner:
            new = write_over(tuple(inner), call, call(aten.slice.Tensor, buffer, first.dim, *first.at), new)
        result = call(aten.slice_scatter.default, buffer, new, first.dim, *first.at)
    return result


def write_of(node: fx.Node) -> CacheWrite | None:
    """Return ``node`` as a write in which each position gets its own value, without broadcasting; None otherwise."""
    how = decode(node)
    length: Size
    if isinstance(how, moves.WriteRows):
        step, length = WriteStep(packet(node), how.dim, (how.index,)), next(iter(shape(how.index)), 1)
    elif isinstance(how, moves.Write):
        step, length = WriteStep(packet(node), how.dim, how.bounds), shape(how.x)[how.dim]
    else:
        return _write_by_pairs(node)
    if not _fits(how.base, how.x, how.dim, length):
        return None
    inner = write_of(how.x) if isinstance(how, moves.Write) else None
    if inner is not None and _is_part(inner.buffer, how.base, step):
        return CacheWrite(node, how.base, inner.new, (step, *inner.steps))
    return CacheWrite(node, how.base, how.x, (step,))


def rows_written(node: fx.Node) -> moves.WriteRows | None:
    """Return ``node`` as a write of one row for each position in a tensor."""
    how = decode(node)
    if not isinstance(how, moves.WriteRows) or len(shape(how.index)) != 1 or write_of(node) is None:
        return None
    return how


def is_zeros(node: fx.Node) -> bool:
    """Whether ``node`` starts a buffer of zeros."""
    how = decode(node)
    return isinstance(how, moves.Fill) and how.value == 0 and not isinstance(how.value, bool)


def seen_through_views(graph: fx.Graph) -> set[fx.Node]:
    """Return tensors of which the caller gets views. If they became rows, a write would no longer show in the views."""
    shown: set[fx.Node] = set()
    for value in graph.output_node().all_input_nodes:
        root = view_source(value)
        while root is not None and root not in shown:
            shown.add(root)
            root = view_source(root)
    return shown


def _write_by_pairs(node: fx.Node) -> CacheWrite | None:
    """Return a write at positions along several neighbouring axes, such as one position for each sequence."""
    if packet(node) is not aten.index_put or argument(node, 3, "accumulate", False):
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
    if not fits or not same_sizes(sizes, shape(new)):
        return None
    return CacheWrite(node, base, new, (WriteStep(aten.index_put, dims[0], tuple(at)),))


def _is_part(node: fx.Node, base: fx.Node, step: WriteStep) -> bool:
    """Whether ``node`` is the part of ``base`` that ``step`` replaces."""
    how = decode(node)
    return isinstance(how, moves.Slice) and how.x is base and how.dim == step.dim and how.bounds == step.at


def _fits(buffer: fx.Node, new: fx.Node, dim: int, length: Size) -> bool:
    """Whether ``new`` has the buffer's shape except for its ``length`` along ``dim``, so that nothing is broadcast."""
    # One value that is broadcast over several positions could not be written as one row for each.
    sizes = [*shape(buffer)[:dim], length, *shape(buffer)[dim + 1 :]]
    return same_sizes(sizes, shape(new))
