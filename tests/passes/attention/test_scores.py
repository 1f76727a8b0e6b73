"""Following scores between the products: what is followed, and what is not taken for something else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mla_compile.codes import Code
from mla_compile.passes.attention.find import find_attention
from tests.passes.attention.test_find import B, S, T, closed, find, one, qkv, sizes
from tests.passes.linear.test_odd import symbolic
from tests.support.modules import MLA, H, causal, inputs
from tests.support.programs import OP, absorbed, codes, export, optimized, refused, seeded
from tests.support.tiers import also


def between(fn, **options):
    """MLA with ``fn(scores, v)`` for the probabilities."""

    class Between(MLA):
        def attend(self, q, k, v, mask):
            return fn(q @ k.mT * self.scale, v) @ v

    return Between(**options)


REFUSED = {
    "divided and rounded down": lambda s, v: torch.div(s, 0.25, rounding_mode="floor").softmax(-1),
    "the same bytes as other numbers": lambda s, v: s.half().view(torch.bfloat16).double().softmax(-1),
    "a number over the scores": lambda s, v: torch.div(torch.ones_like(s[..., :1]), s.abs() + 1).softmax(-1),
    "one score for two heads": lambda s, v: s[:, :1].expand(-1, H, -1, -1).softmax(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_told(name):
    refused(between(REFUSED[name]), inputs(S=3), Code.UNSUPPORTED_OP)


def test_sums_and_differences_of_softmaxes_are_absorbed():
    absorbed(between(lambda s, v: s.softmax(-1) - 0.3 * (2 * s).softmax(-1) + (s + 1).softmax(-1)), inputs(S=3))


OPEN = {
    "a bias with a factor": lambda s, v: torch.add(s, torch.arange(H).view(H, 1, 1), alpha=2.0).softmax(-1),
    "something added to the probabilities": lambda s, v: s.softmax(-1) + torch.arange(H).view(H, 1, 1),
    "scores permuted": lambda s, v: s.permute(2, 0, 3, 1).softmax(2).permute(1, 3, 0, 2),
    "dropout that is off": lambda s, v: torch.ops.aten.native_dropout(s.softmax(-1), 0.5, False)[0],
}


@pytest.mark.parametrize("name", OPEN)
def test_what_is_followed_is_absorbed(name):
    absorbed(between(OPEN[name]), inputs(S=3))


def test_a_fill_is_what_its_casts_make_of_it():
    """-1e9 in float16 is minus infinity: rows without a visible key are NaN, not the mean of the values."""

    def fn(q, k, v):
        hidden = torch.full((), -1e9, dtype=torch.float64).to(torch.float16).to(torch.float64)
        return torch.where(causal(S, T), q @ k.mT, hidden).softmax(-1) @ v

    (mask,) = closed(one(fn, qkv()), masks=1).masks
    assert (mask.kind, mask.fill) == ("keep", float("-inf"))


def test_a_fill_of_unknown_value_leaves_the_core_open():
    def fn(q, k, v, fill):
        return torch.where(causal(S, T), q @ k.mT, fill.to(torch.float64)).softmax(-1) @ v

    assert one(fn, [*qkv(), torch.tensor(-9.0)]).open_core == "scores are replaced by a tensor"


def test_of_appended_columns_only_the_first_are_the_keys():
    """Every second column of scores and sinks is as many as there are keys, and is not the keys."""

    def fn(q, k, v, step):
        scores = torch.cat([q @ k.mT, torch.zeros(B, H, S, T, dtype=q.dtype)], -1).softmax(-1)
        return scores[..., : step * T : step] @ v

    assert one(lambda q, k, v: fn(q, k, v, 1), qkv()).open_core is not None
    assert find(lambda q, k, v: fn(q, k, v, 2), qkv()) == []


def test_permuted_scores_are_the_same_attention():
    def fn(q, k, v):
        return torch.einsum("bshk,bhtk->bsht", q.transpose(1, 2), k).permute(0, 2, 1, 3).softmax(-1) @ v

    assert sizes(closed(one(fn, qkv()))) == (B * H, S, T)


@pytest.mark.parametrize("grouped_first", [True, *also("combination", False)])
def test_a_sum_of_products_that_see_the_heads_in_other_factors(grouped_first):
    """The columns that all heads share meet the queries in groups of heads."""

    class Grouped(MLA):
        def attend(self, q, k, v, mask):
            (B, H, S, _), N = q.shape, self.N
            apart = q[..., :N] @ k[..., :N].mT
            shared = q[..., N:].reshape(B, 2, H // 2, S, -1) @ k[:, :1, None, :, N:].mT
            parts = (shared.flatten(1, 2), apart) if grouped_first else (apart, shared.flatten(1, 2))
            return ((parts[0] + parts[1]) * self.scale).masked_fill(~mask, -1e9).softmax(-1) @ v

    absorbed(Grouped(H=4), [*inputs(S=3), causal(3, 7)])


NO_PRODUCTS = {
    "three operands": lambda q, k, v: torch.einsum("bhsk,bhtk,h->bhst", q, k, q[0, :, 0, 0]).softmax(-1) @ v,
    "a query without an axis of queries": lambda q, k, v: (k[0, 0] @ q[0, 0, 0]).softmax(-1) @ v[0, 0],
    "two numbers for each key": lambda q, k, v: (
        torch.einsum("bhsij,bhtij->bhst", q.unflatten(-1, (2, 3)), k.unflatten(-1, (2, 3))).softmax(-1) @ v
    ),
    "a number times the queries, summed": lambda q, k, v: (q * 2.0).sum(-1, keepdim=True).softmax(-2) * v[:, :, :S],
    "the weights of a key summed by themselves": lambda q, k, v: torch.einsum(
        "bhst,bhuv->bhsv", (q @ k.mT).softmax(-1), v
    ),
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_no_attention_is_found_in(name):
    assert find(NO_PRODUCTS[name], qkv()) == []


def test_keys_that_the_queries_have_too():
    """A weight for each token from its own query and key: no sum over the keys of other queries."""

    def fn(q, k, v):
        return torch.einsum("bhs,bhsv->bhv", torch.einsum("bhsk,bhsk->bhs", q, k).softmax(-1), v)

    (site,) = find(fn, qkv(T=S))
    assert (site.problem.code, site.problem.detail) == (
        "softmax_axis",
        "the values are not summed over the keys of the query-key product",
    )


@pytest.mark.parametrize("dtype", [torch.float32, *also("family", torch.float64)])
def test_a_mask_that_is_scaled_with_the_scores(dtype):
    """In the dtype of the scores, whatever its own."""

    def fn(scores, v):
        return ((scores + (torch.arange(7) / 3).to(dtype)) * 0.7).softmax(-1)

    assert OP.removesuffix(".default") in str(absorbed(between(fn), inputs(S=3), lowering="op").gm.code)


def test_a_fused_attention_of_heads_of_any_width():
    program = symbolic(F.scaled_dot_product_attention, qkv(), [])
    (site,) = find_attention(program.gm.graph, ())
    assert (site.problem.code, site.problem.detail) == (
        "unsupported_op",
        "a scale or head width that is not a constant",
    )


def test_an_attention_in_a_graph_of_its_own_is_told():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(
                x.sum() > 0, lambda x: (x @ (x + 1.0).transpose(1, 2)).softmax(-1) @ x, lambda x: x * 2.0, (x,)
            )

    outcome = optimized(export(Branch(), [seeded(2, 5, 4)]))
    assert codes(outcome) == [Code.UNSUPPORTED_OP]
    assert outcome.report.sites[0].reason == "the attention is in a separate graph that cond calls"
