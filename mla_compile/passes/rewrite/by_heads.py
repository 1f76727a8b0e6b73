"""Compute an attention with large K and V for a few heads at a time, from the weights to the merged output.

Before: ``out = merge(attention(heads(linear(x, Wq)), K(linear(c, Wkv)), V(...)))`` for all H heads

After: ``out[:, :, a:b] = merge(attention(heads(linear(x, Wq[a:b])), K(linear(c, Wkv[a:b])), V(...)))`` for each group

The results do not change, but memory holds each per-head tensor for only one group at a time. So the groups have to run
one after the other. A compiler, however, first runs every operator whose inputs are ready, such as the keys of all
groups. Therefore, each group reads copies of its weights and of the rotary key. A group's copies are made only when the
previous group is done (``mla_compile::copy_after``). All copies together are no larger than the weights plus one rotary
key per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import Argument

from mla_compile.passes.dependence.again import Dim
from mla_compile.passes.dependence.parts import PartMaker
from mla_compile.passes.dependence.region import Region
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.moves import Expand, Fill
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.rewrite.equal_widths import lacking, padded

aten = torch.ops.aten


def by_heads(
    region: Region, bounds: Sequence[int], fake_mode: FakeTensorMode | None, *, in_order: bool, pad: bool
) -> fx.Node:
    """Compute ``region`` in groups of heads, separated by ``bounds``; return the joined output of all groups.

    ``in_order``: whether each group waits for the previous group, as is necessary if a compiler schedules the graph.
    ``pad``: whether to pad values to the width of the keys (:mod:`mla_compile.passes.rewrite.equal_widths`).
    """
    maker = _GroupMaker(region, fake_mode, pad=pad)
    builder, dim = maker.builder, region.dim
    made: list[fx.Node] = []
    rows: fx.Node | None = None
    for start, stop in pairwise(bounds):
        maker.after = rows
        made.append(maker.make(region.out, dim, start, stop))
        if in_order:
            # Each output is written into place at once. A concatenation at the end would keep all outputs alive.
            if rows is None:
                sizes = [builder.size(made[0], k) for k in range(len(shape(region.out)))]
                sizes[dim] = bounds[-1]
                rows = builder.call(aten.new_empty.default, made[0], sizes)
            rows = builder.call(aten.slice_scatter.default, rows, made[-1], dim, start, stop)
    joined = builder.call(aten.cat.default, made, dim) if rows is None else rows
    return same_layout(builder, joined, region.out)


class _GroupMaker(PartMaker):
    """Makes the parts of a group of heads; ``after``: the node that must be computed before the group begins."""

    def __init__(self, region: Region, fake_mode: FakeTensorMode | None, *, pad: bool) -> None:
        super().__init__(region.parts, region.out, fake_mode, region.core)
        self.after: fx.Node | None = None
        self.pad = pad

    def _slice(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        how = decode(node)
        if isinstance(how, Fill) and not isinstance(how.value, fx.Node):
            # A constant tensor is made for this group only, because the whole tensor may be as large as K of all heads.
            wanted = [self.builder.size(node, k) for k in range(len(shape(node)))]
            wanted[dim] = stop - start
            return self.builder.filled(wanted, how.value, node)
        return self._in_turn(super()._slice(node, dim, start, stop))

    def _in_shape(self, node: fx.Node, dim: int, length: Dim, part: fx.Node | None) -> fx.Node:
        # All heads share this rotary key. Otherwise, a compiler could copy the key for all groups at once.
        how = decode(node)
        if part is None and isinstance(how, Expand):
            part = self._in_turn(how.x)
        return super()._in_shape(node, dim, length, part)

    def _in_turn(self, x: fx.Node) -> fx.Node:
        """Return a copy of ``x`` that is made after the previous group; ``x`` itself if ``after`` is None."""
        return x if self.after is None else self.builder.call(torch.ops.mla_compile.copy_after.default, x, self.after)

    def _again(
        self, node: fx.Node, op: Callable[..., object], args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> fx.Node:
        columns = lacking(node) if self.pad else 0
        if not columns:
            return super()._again(node, op, args, kwargs)
        query, key, value, *others = args
        assert isinstance(value, fx.Node)
        narrow = shape(value)[-1]
        out = super()._again(node, op, (query, key, padded(self.builder, value, columns), *others), kwargs)
        return self.builder.call(aten.slice.Tensor, out, -1, 0, narrow)
