"""Writes into a buffer of full length: the same write puts rows where it put K or V.

``K = index_copy(buffer, tokens, positions, k_new)`` holds at each position what was written there last, else what the
buffer held. Over rows that is ``index_copy(rows, tokens, positions, c_new)``, by the same positions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_compile.passes.cache.recipe import Call
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.sizes import Size, same

aten = torch.ops.aten


@dataclass(frozen=True)
class Write:
    """``new`` is written to positions of axis ``dim`` of ``buffer``; ``where``: the operator and which positions."""

    node: fx.Node
    buffer: fx.Node
    new: fx.Node
    dim: int
    where: tuple[Hashable, ...]

    def over(self, call: Call, buffer: fx.Node, new: fx.Node, dim: int) -> fx.Node:
        """The same write of other things along another axis."""
        op, *at = self.where
        result: fx.Node
        if op is aten.index_copy:
            result = call(aten.index_copy.default, buffer, dim, at[0], new)
        elif op is aten.index_put:
            result = call(aten.index_put.default, buffer, [*[None] * dim, at[0]], new)
        else:
            result = call(aten.slice_scatter.default, buffer, new, dim, *at)
        return result


def write_of(node: fx.Node) -> Write | None:
    """The write that ``node`` is, where each position along one axis gets what is given for it and nothing else."""
    if packet(node) not in (aten.index_copy, aten.index_put, aten.slice_scatter):
        return None
    buffer: Any = args_of(node)[0]
    rank = len(shape(node))
    where: tuple[Any, ...]
    if packet(node) is aten.index_copy:
        dim, index, new = axis(args_of(node)[1], rank), args_of(node)[2], args_of(node)[3]
        where, length = (aten.index_copy, index), shape(index)[0] if shape(index) else 1
    elif packet(node) is aten.index_put:
        indices, new = args_of(node)[1], args_of(node)[2]
        given = [k for k, i in enumerate(indices) if i is not None]
        if len(given) != 1 or argument(node, 3, "accumulate", False):
            return None
        dim, index = given[0], indices[given[0]]
        if len(shape(index)) != 1 or val(index).dtype not in (torch.int64, torch.int32):  # else it is a mask
            return None
        where, length = (aten.index_put, index), shape(index)[0]
    else:
        new, dim = args_of(node)[1], axis(argument(node, 2, "dim", 0), rank)
        at = tuple(argument(node, k, name, default) for k, name, default in _BOUNDS)
        where, length = (aten.slice_scatter, *at), shape(new)[dim]
    if not is_tensor(buffer) or not is_tensor(new) or not _fits(buffer, new, dim, length):
        return None
    return Write(node, buffer, new, dim, where)


_BOUNDS = ((3, "start", None), (4, "end", None), (5, "step", 1))


def _fits(buffer: fx.Node, new: fx.Node, dim: int, length: Size) -> bool:
    """Whether ``new`` is the buffer's shape but for its ``length`` along ``dim``: nothing is broadcast."""
    sizes = [*shape(buffer)[:dim], length, *shape(buffer)[dim + 1 :]]
    return len(sizes) == len(shape(new)) and all(same(a, b) for a, b in zip(sizes, shape(new), strict=True))


def slice_over(node: fx.Node, dim: int) -> fx.Node | None:
    """What ``node`` is a slice of along ``dim``; None where it is none."""
    if packet(node) is not aten.slice or axis(argument(node, 1, "dim", 0), len(shape(node))) != dim:
        return None
    x: fx.Node = args_of(node)[0]
    return x
