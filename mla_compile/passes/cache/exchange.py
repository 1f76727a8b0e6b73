"""The communication between ranks for an attention over shared rows, as operators of a graph.

If all ranks of the group compute the same heads::

    out, lse = attention(q, own rows)
    parts = all_gather([out | lse])                                    # [C, B, S, H, L + 1]
    out, lse = merge(parts)

If each rank has its own heads, all queries are gathered first, and each result returns to the rank that has the head::

    q' = all_gather(q)                                                 # [B, S, C H, L + R]
    out, lse = attention(q', own rows)
    parts = all_to_all([out | lse])                                    # [C, B, S, H, L + 1]: this rank's heads
    out, lse = merge(parts)

The second form is also correct if all ranks compute the same heads. ``merge`` is :mod:`mla_compile.kernels.merge`,
written as operators. If a query sees no key of a rank, the rank's ``lse`` is minus infinity, and the rank's result gets
no weight. If ``out`` is in half precision, ``lse`` stays float32 and takes two columns. All tensors that are sent are
dense, because collectives ignore strides.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from mla_compile.core.sharing import Sharing
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.ir.merging import weights_of

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


class Exchange:
    """Adds the operators that exchange the queries and results of one attention between ranks."""

    def __init__(self, builder: Builder, sharing: Sharing) -> None:
        self.builder, self.sharing = builder, sharing
        self.call = builder.call

    def queries(self, query: fx.Node) -> fx.Node:
        """Gather the queries [B,S,H,L+R] of all ranks as [B,S,C H,L+R], with the heads in the order of the ranks.

        If all ranks have the same heads, ``query`` is returned.
        """
        if not self.sharing.heads:
            return query
        by_rank = self.gathered(self.call(aten.clone.default, query, memory_format=torch.contiguous_format))
        return self.call(aten.flatten.using_ints, self.call(aten.permute.default, by_rank, [1, 2, 0, 3, 4]), 2, 3)

    def gathered(self, x: fx.Node) -> fx.Node:
        """Gather the tensors of all ranks as [C,...]. This rank's tensor ``x`` must be dense."""
        size, group = self.sharing.size, self.sharing.group
        sent = self.call(_c10d.all_gather_into_tensor.default, self.call(aten.unsqueeze.default, x, 0), size, group)
        return self.call(_c10d.wait_tensor.default, sent)

    def replace(self, node: fx.Node, own: fx.Node) -> None:
        """Replace ``node``, an attention over all rows, by the merged results of all ranks.

        ``own``: the attention of all :meth:`queries` over this rank's rows. Both attentions return
        ``(out [B,S,H,L], lse [B,S,H])``. In ``own``, H is the number of gathered heads.
        """
        merged = self._merged(*(self.call(operator.getitem, own, k) for k in (0, 1)))
        for user in list(node.users):
            user.replace_all_uses_with(merged[user.args[1]])  # type: ignore[index]  # the number of the result
            node.graph.erase_node(user)
        node.graph.erase_node(node)

    def _packed(self, out: fx.Node, lse: fx.Node) -> fx.Node:
        """Pack ``out`` and ``lse`` into [B,S,H,L+n]. The bits of ``lse`` become n values of ``out``'s dtype."""
        last = self.call(aten.unsqueeze.default, lse, -1)
        if val(out).dtype != val(lse).dtype:
            last = self.call(aten.view.dtype, last, val(out).dtype)
        return self.call(aten.cat.default, [out, last], -1)

    def _exchanged(self, packed: fx.Node) -> fx.Node:
        """Return the packed results of each rank for this rank's heads, [C,B,S,H,L+n]."""
        if not self.sharing.heads:
            return self.gathered(packed)
        ranks = self.sharing.size
        by_owner = self.call(aten.unflatten.int, packed, 2, [ranks, -1])
        by_owner = self.call(aten.permute.default, by_owner, [2, 0, 1, 3, 4])
        dense = self.call(aten.clone.default, by_owner, memory_format=torch.contiguous_format)
        one_each = [1] * ranks
        sent = self.call(_c10d.all_to_all_single.default, dense, one_each, one_each, self.sharing.group)
        return self.call(_c10d.wait_tensor.default, sent)

    def _merged(self, out: fx.Node, lse: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return ``out`` and ``lse`` of this rank's heads over the rows of all ranks."""
        parts = self._exchanged(self._packed(out, lse))
        call, width = self.call, int(val(out).shape[3])
        outs, sums = call(aten.slice.Tensor, parts, 4, 0, width), call(aten.slice.Tensor, parts, 4, width)
        if val(out).dtype != val(lse).dtype:
            sums = call(aten.clone.default, sums, memory_format=torch.contiguous_format)
            sums = call(aten.view.dtype, sums, val(lse).dtype)
        sums = call(aten.squeeze.dim, sums, 4)
        weight, empty = weights_of(self.builder, sums)
        outs = self.builder.cast(outs, val(lse).dtype)
        outs = call(aten.masked_fill.Scalar, outs, call(aten.unsqueeze.default, empty, -1), 0.0)
        total = call(aten.mul.Tensor, outs, call(aten.unsqueeze.default, weight, -1))
        total = call(aten.sum.dim_IntList, total, [0])
        return self.builder.cast(total, val(out).dtype), call(aten.logsumexp.default, sums, [0])
