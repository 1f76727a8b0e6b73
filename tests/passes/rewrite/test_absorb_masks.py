"""What the operator gets as its mask: as small as it can be, boolean while it can be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_compile.codes import Code
from tests.support.modules import causal, sdpa
from tests.support.programs import OP, codes, decide, seeded

B, H, S, T, L, N, V = 2, 4, 3, 7, 8, 6, 5
ONE = causal(S, T)
SOME = torch.arange(T) != 2
BIAS = seeded(B, 1, S, T, seed=6)
INF = float("-inf")


def absorbed(attend, *masks):
    """The node of the operator, K and V with ``H`` heads being made from a latent."""

    def fn(q, c, *rest):
        *masks, w_k, w_v = rest
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        return attend(q, k, v, *masks)

    inputs = [seeded(B, H, S, N), seeded(B, T, L), *masks]
    _, outcome = decide(fn, inputs, (H * N, L), (H * V, L), lowering="op")
    assert codes(outcome) == [Code.ABSORBED]
    (node,) = (n for n in outcome.program.gm.graph.nodes if str(n.target) == OP)
    return node


def scores(q, k):
    return q @ k.mT * 0.3


MASKS = {
    "a boolean": (lambda q, k, v, a: sdpa(q, k, v, a, 0.3), [ONE], torch.bool, (1, 1, S, T), 0),
    "a boolean for all heads": (lambda q, k, v, a: sdpa(q, k, v, a, 0.3), [SOME[None]], torch.bool, (1, 1, 1, T), 0),
    "two booleans": (
        lambda q, k, v, a, b: scores(q, k).masked_fill(~a, INF).masked_fill(b, INF).softmax(-1) @ v,
        [ONE, ~SOME], torch.bool, (1, 1, S, T), 0,
    ),
    "a bias": (
        lambda q, k, v, a: (scores(q, k) + a).softmax(-1) @ v, [BIAS], torch.float64, (B, 1, S, T), 0,
    ),
    "a bias before the scale": (
        lambda q, k, v, a: ((q @ k.mT + a) * 0.3).softmax(-1) @ v, [BIAS], torch.float64, (B, 1, S, T), 1,
    ),
    "a bias that is doubled": (
        lambda q, k, v, a: ((q @ k.mT + a) * 2).softmax(-1) @ v, [BIAS], torch.float64, (B, 1, S, T), 1,
    ),
    "a bias, then a boolean": (
        lambda q, k, v, a, b: (scores(q, k) + a).masked_fill(~b, INF).softmax(-1) @ v,
        [BIAS, ONE], torch.float64, (B, 1, S, T), 0,
    ),
    "a bias for one of two axes of heads": (
        lambda q, k, v, a: sdpa(*(z.unflatten(1, (2, 2)) for z in (q, k, v)), a, 0.3).flatten(1, 2),
        [seeded(2, 1, 1, T)], torch.float64, (1, H, 1, T), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_of_the_operator(name):
    attend, masks, dtype, shape, products = MASKS[name]
    node = absorbed(attend, *masks)
    value = node.args[4].meta["val"]
    assert (value.dtype, tuple(value.shape)) == (dtype, shape)
    assert sum(n.target == torch.ops.aten.mul.Tensor for n in node.graph.nodes) == products
