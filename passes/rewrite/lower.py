"""Replaces the attention operator by plain ATen, for packages and exporters that must stand without this library.

Before: ``out, lse = mla_compile.decode_attention(q, c, k_rope, values, mask, scale, causal)``

After: two products, a softmax in float32, one product, in the formulas of :mod:`mla_compile.kernels.reference`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, argument, packet, val

aten = torch.ops.aten


def lower_to_aten(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Expands every attention operator of ``graph``; returns how many."""
    nodes = [n for n in graph.nodes if packet(n) is torch.ops.mla_compile.decode_attention]
    for node in nodes:
        _expand(node, Builder(node, fake_mode))
    return len(nodes)


def _expand(node: fx.Node, builder: Builder) -> None:
    call = builder.call
    query, latent, rope, values, mask = (argument(node, i, n) for i, n in enumerate(_TENSORS))
    scale: Any = node.kwargs["scale"]
    wide = torch.promote_types(torch.float32, val(latent).dtype)
    width = int(val(latent).shape[-1])

    def scores_of(rows: fx.Node, start: int, stop: int) -> fx.Node:
        q = call(aten.slice.Tensor, query, 3, start, stop) if rope is not None else query
        q, r = builder.cast(q, wide), builder.cast(rows, wide)
        return call(aten.einsum.default, "bshl,btl->bhst", [q, r])

    scores = scores_of(latent, 0, width)
    if rope is not None:
        total = int(val(query).shape[-1])
        scores = call(aten.add.Tensor, scores, scores_of(rope, width, total))
    scores = call(aten.mul.Tensor, scores, scale)
    hidden: list[fx.Node] = []
    if mask is not None and val(mask).dtype == torch.bool:
        hidden.append(call(aten.logical_not.default, mask))
    elif mask is not None:
        scores = call(aten.add.Tensor, scores, builder.cast(mask, wide))
    if argument(node, 6, "causal", False):
        hidden.append(_future(builder, scores))
    for h in hidden:
        scores = call(aten.masked_fill.Scalar, scores, h, float("-inf"))
    probs = call(aten.softmax.int, scores, -1)
    if mask is not None:  # rows without a visible key give zeros, as in PyTorch's fused attention
        empty = call(aten.eq.Scalar, call(aten.amax.default, scores, [-1], True), float("-inf"))
        probs = call(aten.masked_fill.Scalar, probs, empty, 0.0)
    rows = latent if values is None else values
    out = call(aten.einsum.default, "bhst,btl->bshl", [probs, builder.cast(rows, wide)])
    out = builder.cast(out, val(query).dtype)
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 0:
            user.replace_all_uses_with(out)
        else:
            lse = call(aten.logsumexp.default, scores, [-1])
            user.replace_all_uses_with(call(aten.transpose.int, lse, 1, 2))
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _future(builder: Builder, scores: fx.Node) -> fx.Node:
    """[S, T], True where a key lies after the query (bottom-right aligned)."""
    s, t = builder.size(scores, 2), builder.size(scores, 3)
    device = val(scores).device
    rows = builder.call(aten.arange.default, s, device=device)
    columns = builder.call(aten.arange.default, t, device=device)
    shift = builder.call(operator.sub, t, s) if isinstance(s, fx.Node) or isinstance(t, fx.Node) else t - s
    rows = builder.call(aten.add.Tensor, builder.call(aten.unsqueeze.default, rows, 1), shift)
    return builder.call(aten.gt.Tensor, columns, rows)


_TENSORS = ("query", "latent", "rope", "values", "mask")
