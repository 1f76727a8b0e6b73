"""Pad the values of a fused attention to the width of its keys. Torch's fused attention on CPUs requires equal widths.

Before: ``out = scaled_dot_product_attention(q, k, v)``, which writes the scores of all heads to memory

After: ``out = scaled_dot_product_attention(q, k, cat([v, zeros]))[..., :V]``

The results of the added columns are zeros, which are cut off.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, packet, replace_each, shape, val
from mla_compile.passes.ir.sizes import hint, size

aten = torch.ops.aten

FEWEST = 16
"""The number of queries from which padding pays. For fewer queries, the scores take less memory than the values."""


def equal_widths(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Pad the values of attentions of many queries on a CPU; return how many were padded.

    A symbolic number of queries is judged by its hint.
    """

    def of_equal_widths(node: fx.Node) -> fx.Node | None:
        columns = lacking(node)
        if not columns or val(node).device.type != "cpu":
            return None
        queries = val(node).shape[-2]
        if hint(size(queries), queries) < FEWEST:
            return None
        builder = Builder(node, fake_mode)
        query, key, value, *others = args_of(node)
        wide = padded(builder, value, columns)
        attended = builder.call(aten.scaled_dot_product_attention.default, query, key, wide, *others, **node.kwargs)
        return builder.call(aten.slice.Tensor, attended, -1, 0, shape(value)[-1])

    return replace_each(graph.nodes, of_equal_widths)


def lacking(node: fx.Node) -> int:
    """Return by how many columns the values of a fused attention are narrower than its keys; 0 for other nodes."""
    if packet(node) is not aten.scaled_dot_product_attention:
        return 0
    query, _, value = args_of(node)[:3]
    wide, narrow = (size(val(n).shape[-1]) for n in (query, value))
    return max(0, wide - narrow) if isinstance(wide, int) and isinstance(narrow, int) else 0


def padded(builder: Builder, value: fx.Node, columns: int) -> fx.Node:
    """Return ``value`` with further columns of zeros.

    ``constant_pad_nd`` would specialise symbolic sizes of fake tensors.
    """
    lead = [builder.size(value, k) for k in range(len(shape(value)) - 1)]
    zeros = builder.call(aten.new_zeros.default, value, [*lead, columns])
    return builder.call(aten.cat.default, [value, zeros], -1)
