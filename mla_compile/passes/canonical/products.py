"""Split the fused multiply-adds of an attention into products and sums, so that analyses can follow both.

Before: ``s = baddbmm(bias, q, k, beta=b, alpha=a); p = softmax(s)``, or ``baddbmm(x, p, v)``

After: ``s = bias * b + bmm(q, k) * a; p = softmax(s)``. If ``beta`` is 0, the bias is not read, as in the original.
Fused products that are neither upstream nor downstream of a softmax stay unchanged.

Before: ``k = addcmul(up(c), row, gate)`` or ``addcdiv``, upstream of a product of activations

After: ``k = up(c) + row * gate``
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.score_tracer import SOFTMAX
from mla_compile.passes.ir.graph import Builder, args_of, packet, val
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.walk import nearest

aten = torch.ops.aten
_PRODUCTS = {aten.baddbmm.default: aten.bmm.default, aten.addmm.default: aten.mm.default}
_GATES = {aten.addcmul.default: aten.mul.Tensor, aten.addcdiv.default: aten.div.Tensor}


def split_products(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Split fused products next to a softmax or ``exp``, and ``addcmul`` and ``addcdiv``; return how many."""
    found = 0
    for node in [n for n in graph.nodes if n.target in _PRODUCTS or n.target in _GATES]:
        added, left, right = args_of(node)[:3]
        if not val(node).dtype.is_floating_point:
            continue
        build = Builder(node, fake_mode)
        if node.target in _GATES:
            if not is_multiplied(node, weights):
                continue
            beta, alpha = 1, node.kwargs.get("value", 1)
            product = build.call(_GATES[node.target], left, right)
        # A product with a weight is a projection. The rules of linear maps read a projection together with its bias.
        elif left in weights or right in weights or not _beside_a_softmax(node):
            continue
        else:
            beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
            product = build.call(_PRODUCTS[node.target], left, right)
        if alpha != 1:
            product = build.call(aten.mul.Tensor, product, alpha)
        # If `beta` is 0, torch ignores the bias. A multiplication by zero would keep NaN.
        if beta != 0:
            added = added if beta == 1 else build.call(aten.mul.Tensor, added, beta)
            product = build.call(aten.add.Tensor, added, product)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        found += 1
    return found


def is_multiplied(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether a product of activations reads ``node`` (directly or indirectly), as an attention reads K and V."""

    def multiplies(user: fx.Node) -> bool:
        product = is_contraction(user) and not any(n in weights for n in user.all_input_nodes)
        return product or packet(user) is aten.scaled_dot_product_attention

    return bool(nearest(node, lambda n: n.users, multiplies, is_contraction)[0])


def _beside_a_softmax(node: fx.Node) -> bool:
    """Whether the product makes the scores of a softmax, or multiplies the probabilities of a softmax."""
    operands = args_of(node)[1:3]
    before, _ = nearest(node, lambda n: operands if n is node else n.all_input_nodes, _is_softmax, is_contraction)
    after, _ = nearest(node, lambda n: n.users, _is_softmax, is_contraction)
    return bool(before or after)


def _is_softmax(node: fx.Node) -> bool:
    return packet(node) in SOFTMAX or packet(node) is aten.exp
