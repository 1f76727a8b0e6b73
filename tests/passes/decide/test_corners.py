"""Corners of the passes that no other test turns: small modules, each with what must become of it."""

from __future__ import annotations

import pytest
import torch

from mla_compile.codes import Code
from tests.support.modules import MLA, H, N, R, causal, inputs
from tests.support.programs import absorbed, assert_equal, export, optimized, refused, seeded
from tests.support.usual import usual


def test_values_summed_over_the_queries():
    """Probabilities turned before they meet the values: a softmax over the keys, and a sum over something else."""

    class Turned(MLA):
        def attend(self, q, k, v, mask):
            return (q @ k.mT).softmax(-1).mT @ v

    refused(Turned(), inputs(S=7), Code.SOFTMAX_AXIS)


def test_rotary_keys_of_every_head_with_batch_and_heads_in_one_axis():
    """The latent part of K has batch and heads as two factors of an axis, the rotary part has them as one."""

    class Merged(MLA):
        def join(self, k, r):
            return torch.cat([k.flatten(0, 1), r], -1)

        def attend(self, q, k, v, mask):
            scores = torch.bmm(q.flatten(0, 1), k.mT) * self.scale
            return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (-1, H))

    x, c, _ = inputs()
    given = [x, c, seeded(2 * H, 7, R)]
    program = export(Merged(), given)
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("keys", "values")), site.reason
    assert [k.code for k in site.kept] == [Code.PER_HEAD_ROPE]
    assert_equal(Merged(), outcome.program, given)


# Parts between the products that are no plain softmax, or a plain one in other words.


def keys_before_queries(scores, mask):
    return scores.permute(0, 1, 3, 2).softmax(2).permute(0, 1, 3, 2)


def twice_a_mask(scores, mask):
    return torch.add(scores, torch.where(mask, 0.0, -1.0), alpha=2.0).softmax(-1)


def other_scores_where_hidden(scores, mask):
    return torch.where(mask, scores, scores.new_full((7,), -3.0) * torch.arange(7)).softmax(-1)


def a_lowest_number_that_is_converted(scores, mask):
    lowest = torch.full((), float("-inf"), dtype=torch.float32).to(scores.dtype)
    return torch.where(mask, scores, lowest).softmax(-1)


def hidden_twice(scores, mask):
    """Rows without a visible key: all keys weigh alike, before the second mask is added."""
    return (scores.masked_fill(~mask, -1e30) + torch.where(mask, 0.0, -2.0)).softmax(-1)


def a_number_added(scores, mask):
    return (scores + 0.7).softmax(-1)


def something_added_to_the_probabilities(scores, mask):
    return scores.softmax(-1) + torch.where(mask, 0.1, 0.2)


def zeros_for_empty_rows(scores, mask):
    return torch.ops.aten._safe_softmax(scores.masked_fill(~mask, float("-inf")), -1)


BETWEEN = [
    keys_before_queries, twice_a_mask, other_scores_where_hidden, a_lowest_number_that_is_converted, hidden_twice,
    a_number_added, something_added_to_the_probabilities, zeros_for_empty_rows,
]  # fmt: skip


@pytest.mark.parametrize(
    "core", usual(BETWEEN, rare=(a_number_added, something_added_to_the_probabilities)), ids=lambda f: f.__name__
)
def test_between_the_products(core):
    class Own(MLA):
        def attend(self, q, k, v, mask):
            return core(q @ k.mT * self.scale, mask) @ v

    absorbed(Own(), [*inputs(S=3), causal(3, 7)])


def test_one_of_two_products_is_masked():
    class Own(MLA):
        def attend(self, q, k, v, mask):
            nope = (q[..., :N] @ k[..., :N].mT).masked_fill(~mask, -1.0)
            return (nope + q[..., N:] @ k[..., N:].mT).softmax(-1) @ v

    absorbed(Own(), [*inputs(S=3), causal(3, 7)])


def test_a_product_with_a_mask_in_one_operator():
    """``baddbmm``, as in Megatron and Bloom, with both of its factors."""

    class Own(MLA):
        def attend(self, q, k, v, mask):
            B = len(q)
            added = torch.where(mask, 0.0, -4.0).to(q.dtype).expand(B, H, -1, -1).flatten(0, 1)
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            scores = torch.baddbmm(added, q, k.mT, beta=0.5, alpha=self.scale)
            return torch.bmm(scores.softmax(-1), v).unflatten(0, (B, H))

    absorbed(Own(), [*inputs(S=3), causal(3, 7)])
