"""Products of queries and keys that add something in the same operator."""

from __future__ import annotations

import pytest
import torch

from mla_compile.passes.canonical.products import split_products
from tests.support.modules import MLA, inputs, padded
from tests.support.programs import absorbed, calls, seeded, trace
from tests.support.tiers import also


def fused(q, k, v, mask, **factors):
    """Batch and heads in one axis, as ``baddbmm`` wants them; ``factors``: alpha and beta."""
    B, H, S, _ = q.shape
    T = k.shape[2]
    bias = torch.zeros(B, 1, S, T, dtype=q.dtype).masked_fill(~mask, -1e9).expand(B, H, S, T).reshape(B * H, S, T)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, **factors)
    return (scores.softmax(-1) @ v.flatten(0, 1)).view(B, H, S, -1)


def plain_bias(q, k, v, mask, scale):
    return fused(q * scale, k, v, mask)


def factors(q, k, v, mask, scale):
    return fused(q, k, v, mask, alpha=scale, beta=0.5)


def unread_bias(q, k, v, mask, scale):
    """The way of older code: an empty tensor that ``beta=0`` keeps out, then the mask."""
    B, H, S, _ = q.shape
    T = k.shape[2]
    nothing = torch.full((1, 1, 1), float("nan"), dtype=q.dtype)
    scores = torch.baddbmm(nothing, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale).view(B, H, S, T)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def capped(q, k, v, mask, scale):
    """Something between the products that is not the plain formula: the products are rewritten one by one."""
    B, H, S, _ = q.shape
    T = k.shape[2]
    bias = torch.zeros(1, 1, 1, dtype=q.dtype)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale).view(B, H, S, T)
    floor = torch.tensor(-1e9, dtype=q.dtype)
    return torch.max(5 * torch.tanh(scores / 5).masked_fill(~mask, -1e9), floor).softmax(-1) @ v


def summed_values(q, k, v, mask, scale):
    """The product with the values is added to something."""
    p = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).softmax(-1)
    x = seeded(q.shape[2], v.shape[-1])[None]
    return torch.baddbmm(x, p.flatten(0, 1), v.flatten(0, 1), beta=0.5, alpha=2.0).unflatten(0, q.shape[:2])


def matrices(q, k, v, mask, scale):
    """One sequence and one head, without axes for them."""
    bias = torch.zeros(mask.shape[2:], dtype=q.dtype).masked_fill(~mask[0, 0], -1e9)
    return torch.addmm(bias, q[0, 0], k[0, 0].T, alpha=scale).softmax(-1).mm(v[0, 0])[None, None]


class Fused(MLA):
    def __init__(self, core, **options):
        super().__init__(**options)
        self.fused = core

    def attend(self, q, k, v, mask):
        return self.fused(q, k, v, mask, self.scale)


@pytest.mark.singly
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize("core", [factors, capped, summed_values, *also("combination", plain_bias, unread_bias)])
def test_products_with_a_sum_are_absorbed(core, S):
    absorbed(Fused(core), [*inputs(S=S), padded(2, S, 7) | torch.eye(S, 7, dtype=torch.bool)])


def test_matrices_are_absorbed():
    absorbed(Fused(matrices, H=1, L=4), [*inputs(B=1, S=3, L=4), padded(1, 3, 7)])


def test_factors_of_one_leave_no_operator():
    data = [seeded(2, 3, 5), seeded(2, 3, 4), seeded(2, 4, 5)]
    program = trace(lambda c, a, b: torch.baddbmm(c, a, b).softmax(-1), data, [])
    assert split_products(program.gm.graph, (), program.fake_mode) == 1
    assert calls(program) == ["bmm.default", "add.Tensor", "softmax.int"]


@pytest.mark.parametrize(
    ("fn", "weights"),
    [
        (lambda a, c, b: torch.baddbmm(c, a, b).softmax(-1), 2),
        (lambda a, c, b: torch.baddbmm(c, a, b).relu(), 0),
        (lambda a, c, b: torch.baddbmm(c, a, b) @ a.softmax(-1), 0),
    ],
    ids=["a weight", "no softmax", "a softmax of something else"],
)
def test_others_stay_as_they_are(fn, weights):
    data = [seeded(2, 4, 4), seeded(2, 4, 4, seed=1), seeded(2, 4, 4, seed=2)]
    program = trace(fn, data[: 3 - weights], data[3 - weights :])
    nodes = set(program.gm.graph.find_nodes(op="placeholder")[3 - weights :])
    before = calls(program)
    assert split_products(program.gm.graph, nodes, program.fake_mode) == 0
    assert calls(program) == before
