"""Multiply float8 rows by their scales before an attention, because the ONNX operator reads no float8."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, is_tensor, val
from mla_compile.passes.ir.schema import named_arguments

_FLOAT8 = torch.float8_e4m3fn


def unpack_rows(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Multiply rows by the scales of each attention with a ``kv_scale``. Return the number of these attentions."""
    found = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_attention.default):
        given = named_arguments(node)
        scales, query = given.pop("kv_scale"), given["query"]
        if not is_tensor(scales) or not is_tensor(query):
            continue
        float8 = [name for name in ("latent", "rope") if is_tensor(x := given[name]) and val(x).dtype == _FLOAT8]
        rope = given["rope"]
        dtype = val(rope if is_tensor(rope) and "rope" not in float8 else query).dtype
        multiply, builder = partial(_product, dtype=dtype), Builder(node, fake_mode)
        for name in float8:
            rows = given[name]
            assert is_tensor(rows)
            given[name] = builder.trace(multiply, (rows, scales))
        node.args = (query, given.pop("latent"))
        node.kwargs = {name: x for name, x in given.items() if x is not None and name != "query"}
        found += 1
    return found


def _product(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply rows [B,T,L] in float32 by scales [], [B,T] or [B,T,G], and round the product to ``dtype``."""
    groups = scales.shape[2] if scales.dim() == 3 else 1
    by_group = rows.float().unflatten(-1, (groups, -1))
    factors = scales.reshape(*scales.shape[:2], -1, 1) if scales.dim() else scales
    product: torch.Tensor = (by_group * factors).flatten(-2)
    return product.to(dtype)
