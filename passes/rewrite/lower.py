"""Replaces the attention operator by plain ATen, for packages and exporters that must stand without this library.

Before: ``out, lse = mla_compile.decode_attention(q, c, k_rope, values, mask, seq_lens, scale, causal, window)``

After: two products, a softmax in float32, one product, in the formulas of :mod:`mla_compile.kernels.reference`.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, argument, packet, shape, val
from mla_compile.passes.ir.sizes import at_least
from mla_compile.passes.rewrite.plain import future, hidden, masked_scores, positions, probabilities

aten = torch.ops.aten
_TENSORS = ("query", "latent", "rope", "values", "mask", "seq_lens")


def lower_to_aten(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Expands every attention operator of ``graph``; returns how many."""
    nodes = [n for n in graph.nodes if packet(n) is torch.ops.mla_compile.decode_attention]
    for node in nodes:
        _expand(node, Builder(node, fake_mode))
    return len(nodes)


def _expand(node: fx.Node, builder: Builder) -> None:
    call = builder.call
    query, latent, rope, values, mask, lengths = (argument(node, i, n) for i, n in enumerate(_TENSORS))
    scale = node.kwargs["scale"]
    assert isinstance(scale, (int, float, fx.Node))
    dtype = wide(val(latent).dtype)
    width = int(val(latent).shape[-1])

    def scores_of(rows: fx.Node, start: int, stop: int) -> fx.Node:
        q = call(aten.slice.Tensor, query, 3, start, stop) if rope is not None else query
        q, r = builder.cast(q, dtype), builder.cast(rows, dtype)
        return call(aten.einsum.default, "bshl,btl->bhst", [q, r])

    scores = scores_of(latent, 0, width)
    if rope is not None:
        total = int(val(query).shape[-1])
        scores = call(aten.add.Tensor, scores, scores_of(rope, width, total))
    scores = masked_scores(builder, scores, scale, [] if mask is None else [mask])
    causal, window = node.kwargs.get("causal", False), node.kwargs.get("window", 0)
    if causal or window or lengths is not None:
        rows, columns = positions(builder, (scores, 2), (scores, 3), lengths)
        if causal:
            scores = hidden(builder, scores, future(builder, rows, columns))
        elif lengths is not None:
            last = call(aten.slice.Tensor, rows, 2, -1)
            scores = hidden(builder, scores, future(builder, last, columns))
        if window:
            scores = hidden(builder, scores, call(aten.le.Tensor, columns, call(aten.sub.Tensor, rows, window)))
    # With more queries than keys, the first ones see none.
    more = bool(causal) and not at_least(shape(scores)[3], shape(scores)[2])
    probs = probabilities(builder, scores, some_empty=mask is not None or lengths is not None or more)
    rows = latent if values is None else values
    out = call(aten.einsum.default, "bhst,btl->bshl", [probs, builder.cast(rows, dtype)])
    out = builder.cast(out, val(query).dtype)
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 0:
            user.replace_all_uses_with(out)
        else:
            # The operator's layout is [B, S, H]; scores are [B, H, S, T].
            lse = call(aten.logsumexp.default, scores, [-1])
            user.replace_all_uses_with(call(aten.transpose.int, lse, 1, 2))
        node.graph.erase_node(user)
    node.graph.erase_node(node)
