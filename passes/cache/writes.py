"""Writes into a buffer of full length: the same write puts rows where it put K or V.

``K = index_copy(buffer, tokens, positions, k_new)`` holds at each position what was written there last, else what the
buffer held. Over rows that is ``index_copy(rows, tokens, positions, c_new)``, by the same positions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.passes.cache.recipe import Call
from mla_compile.passes.ir import operators
from mla_compile.passes.ir.graph import packet, shape
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Write:
    """``new`` is written to positions of axis ``dim`` of ``buffer``; ``where``: the operator and which positions."""

    node: fx.Node
    buffer: fx.Node
    new: fx.Node
    dim: int
    where: tuple[Hashable, ...]

    def over(self, call: Call[fx.Node], buffer: fx.Node, new: fx.Node, dim: int) -> fx.Node:
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
    how = decode(node)
    where: tuple[Hashable, ...]
    length: Size
    if isinstance(how, operators.WriteRows):
        where, length = (packet(node), how.index), next(iter(shape(how.index)), 1)
    elif isinstance(how, operators.Write):
        where, length = (packet(node), *how.bounds), shape(how.x)[how.dim]
    else:
        return None
    return Write(node, how.base, how.x, how.dim, where) if _fits(how.base, how.x, how.dim, length) else None


def _fits(buffer: fx.Node, new: fx.Node, dim: int, length: Size) -> bool:
    """Whether ``new`` is the buffer's shape but for its ``length`` along ``dim``: nothing is broadcast."""
    # One value broadcast over several positions could not be written as one row for each.
    sizes = [*shape(buffer)[:dim], length, *shape(buffer)[dim + 1 :]]
    return same_sizes(sizes, shape(new))
