"""A product of queries and keys that adds something in the same operator becomes two operators, which are followed.

Before: ``s = baddbmm(bias, q, k, beta=b, alpha=a); p = softmax(s)``

After: ``s = bias * b + bmm(q, k) * a; p = softmax(s)``. With ``beta=0`` the bias is not read, as in the original.
Products that lead to no softmax stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.graph import Builder, args_of, packet, val
from mla_compile.passes.scores import SOFTMAX
from mla_compile.passes.unfollowed import nearest

aten = torch.ops.aten


def split_products(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Splits the ``baddbmm`` of two activations before every softmax, also one written as ``exp``; returns how many."""
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        bias, left, right = args_of(node)[:3]
        if left in weights or right in weights or not val(node).dtype.is_floating_point or not _is_normalized(node):
            continue
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        build = Builder(node, fake_mode)
        scores = build.call(aten.bmm.default, left, right)
        if alpha != 1:
            scores = build.call(aten.mul.Tensor, scores, alpha)
        if beta != 0:
            bias = bias if beta == 1 else build.call(aten.mul.Tensor, bias, beta)
            scores = build.call(aten.add.Tensor, scores, bias)
        node.replace_all_uses_with(scores)
        graph.erase_node(node)
        found += 1
    return found


def _is_normalized(node: fx.Node) -> bool:
    softmaxes, _ = nearest(node, lambda n: n.users, lambda n: packet(n) in SOFTMAX or packet(n) is aten.exp)
    return bool(softmaxes)
