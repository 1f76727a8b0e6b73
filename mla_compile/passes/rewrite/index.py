"""Compute an indexer's scores by one operator, which does not write the scores of each head to memory.

Before::

    products = relu(q . k * scale)                       # [B, S, J, T], written and read again
    scores = sum_j weights_j products_j                  # [B, S, T]

After: ``scores = mla_compile.index_scores(q, k, weights, scale)``, in float32, cast to the dtype of the sum.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_compile.ops  # noqa: F401  registers the operator
from mla_compile.passes.attention.indexer import Indexer
from mla_compile.passes.ir.arrange import SizeSources, arrange, same_layout, spread
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, val

aten = torch.ops.aten


def index_scores(found: Indexer, fake_mode: FakeTensorMode | None) -> fx.Node:
    """Emit an operator that computes the value of ``found.out``; return its result, which nothing reads yet."""
    builder = Builder(found.out.node, fake_mode)
    operands = sorted(((o.node, o.axes) for o in (found.query, found.keys, found.weights)), key=lambda pair: pair[0])
    sizes = SizeSources(builder, operands)
    B, S, J, T, D = found.batch, found.queries, found.heads, found.tokens, found.features
    query = arrange(builder, sizes, found.query.node, found.query.axes, (B, S, J, D))
    keys = arrange(builder, sizes, found.keys.node, found.keys.axes, (B, T, D))
    if val(query).dtype != val(keys).dtype:
        query = builder.cast(query, torch.float32)
    scores = builder.call(
        torch.ops.mla_compile.index_scores.default, query, keys, _weights(builder, sizes, found), found.scale
    )
    return same_layout(builder, arrange(builder, sizes, scores, (B, S, T), found.out.axes), found.out.node)


def _weights(builder: Builder, sizes: SizeSources, found: Indexer) -> fx.Node:
    """Return the weights [B,S,J], multiplied by the factor that the model applies after the relu."""
    atoms = (*found.batch, *found.queries, *found.heads)
    each = tuple((a,) for a in atoms)
    node = arrange(builder, sizes, found.weights.node, found.weights.axes, each)
    node = spread(builder, sizes, node, atoms)
    node = arrange(builder, sizes, node, each, (found.batch, found.queries, found.heads))
    if found.factor == 1.0:
        return node
    return builder.call(aten.mul.Tensor, builder.cast(node, wide(val(node).dtype)), found.factor)
