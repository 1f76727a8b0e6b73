"""Following scores between the products: what is followed, and what is not taken for something else."""

from __future__ import annotations

import pytest
import torch

from mla_compile.codes import Code
from tests.modules import MLA, H, causal, inputs
from tests.programs import absorbed, assert_untouched, codes, export, optimized, refused
from tests.test_find_attention import B, S, T, closed, find, one, qkv, sizes


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


def test_of_a_difference_of_two_softmaxes_both_are_told():
    program = export(between(lambda s, v: s.softmax(-1) - 0.3 * (2 * s).softmax(-1) + (s + 1).softmax(-1)), inputs(S=3))
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.UNSUPPORTED_OP] * 3
    assert_untouched(program, outcome)


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


@pytest.mark.parametrize("grouped_first", [True, False])
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
