"""Attention that reads float8 rows as they are, instead of a copy in the model's dtype.

Before: ``decode_attention(q, _to_copy(values.to(float32) * scales, bfloat16), rope, ...)``, which writes all rows anew

After: ``decode_attention(q, values, rope, ..., kv_scale=scales)``: the kernel multiplies as it goes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, argument, is_tensor, packet, shape, val
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def read_packed(graph: fx.Graph, fake_mode: FakeTensorMode | None, reads: Callable[[torch.device], bool]) -> int:
    """Hands float8 rows and their scales to the attentions that can take them; returns to how many.

    ``reads``: whether a kernel of the device reads float8. Elsewhere a copy in the model's dtype is the faster way.
    """
    done = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_attention.default):
        query, latent = args_of(node)[:2]
        rope, values = argument(node, 2, "rope"), argument(node, 3, "values")
        found = _float8(latent)
        if found is None or values is not None or torch.float64 in {val(n).dtype for n in (query, latent)}:
            continue
        device = val(latent).device
        beside = (*_HALF, torch.float32) if device.type == "cpu" else _HALF
        if (rope is not None and val(rope).dtype not in beside) or not reads(device):
            continue
        rows, scales = found
        builder = Builder(node, fake_mode)
        node.args = (query, rows, *args_of(node)[2:])
        node.update_kwarg("kv_scale", builder.call(aten.squeeze.dim, scales, -1))
        done += 1
    if done:
        remove_dead_code(graph)
    return done


def _float8(latent: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The float8 values and the scales [B,T,1] that ``latent`` is the product of."""
    product = args_of(latent)[0] if packet(latent) is aten._to_copy else latent
    if packet(product) is not aten.mul or not all(is_tensor(n) for n in args_of(product)):
        return None
    values, scales = args_of(product)
    rows = args_of(values)[0] if packet(values) is aten._to_copy else values
    if val(rows).dtype != torch.float8_e4m3fn or val(scales).dtype != torch.float32:
        return None
    per_token = len(shape(scales)) == 3 and same(shape(scales)[2], 1) and same(shape(scales)[1], shape(rows)[1])
    return (rows, scales) if per_token and same(shape(scales)[0], shape(rows)[0]) else None
