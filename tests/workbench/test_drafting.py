"""Steps that verify drafted tokens: what they cost, and how many tokens they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_compile.core.dims import Dims
from mla_compile.errors import InputError
from mla_compile.report.facts import CachedLayers, Drafting, Facts, LatentSites, Weights
from mla_compile.workbench import step_formulas
from mla_compile.workbench.machines import Machine, machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import AS_STORED, Request
from tests.support.facts import V3, V3_2, V3_LAYER, V3_MTP, V3_STORED, V3_WEIGHTS

H200 = machine("h200")
# 1 byte and 1 FLOP in a second, so that seconds are bytes and FLOPs.
UNIT = Machine("unit", 1e9, 1.0, {"bf16": 1.0}, None, 1.0, 1.0)
# Two layers of 3 heads; 1,000 weights, 100 of them the input embedding, and 11 x 7 the output projection.
SMALL = Facts(
    "small", "MLA", (), (LatentSites(Dims(H=3, L=5, R=2, N=4, V=6), 2, absorbed=True),), (CachedLayers(1, 5, 1, 2, 2),),
    Weights(1000, 100, vocabulary=11), heads=3, width=7,
)  # fmt: skip
LAYER = replace(
    SMALL, latent=(replace(SMALL.latent[0], count=1),), cached=(replace(SMALL.cached[0], count=1),),
    weights=Weights(200, vocabulary=11),
)  # fmt: skip


def test_a_step_by_hand():
    """3 users of 10 tokens, two drafted for each: everything is computed for nine tokens and read once."""
    request = Request(context=10, users=3, draft_tokens=2, acceptance=0.5)
    (row,) = plan(SMALL, UNIT, request).layouts
    assert row.tokens_per_step == 1 + 0.5 + 0.25
    assert row.attention_compute_s == 2 * 2 * 9 * 10 * 3 * (2 * 5 + 2)
    assert row.cache_memory_s == 2 * 2 * (3 * 10 * 7 + 9 * 3 * 12)  # rows once, queries and results of all tokens
    assert row.weight_compute_s == 2 * 9 * 900
    assert row.weight_memory_s == 2 * 900
    assert row.drafting_s == 0
    assert row.tokens_per_s == pytest.approx(3 * 1.75 / row.step_s)


def test_a_layer_that_drafts_by_hand():
    """It passes over the 1.75 tokens that were accepted, and once more over one; its logits are of one token each."""
    request = Request(context=10, users=3, draft_tokens=2, acceptance=0.5)
    (without,), (row,) = (plan(m, UNIT, request).layouts for m in (SMALL, replace(SMALL, drafting=Drafting(1, LAYER))))
    tokens = 3 * (1.75 + 1)
    assert row.attention_compute_s - without.attention_compute_s == pytest.approx(2 * tokens * 10 * 3 * 12)
    assert row.weight_compute_s - without.weight_compute_s == pytest.approx(2 * (tokens * 200 + 2 * 3 * 77))
    assert row.weight_memory_s - without.weight_memory_s == 2 * 2 * (200 + 77)
    assert row.weight_bytes - without.weight_bytes == 2 * 200  # the output projection is the model's
    assert row.cache_bytes_per_user - without.cache_bytes_per_user == 2 * 10 * 7
    assert row.drafting_s == pytest.approx(row.step_s - without.step_s)
    # Two layers draft one token each and both have passed over what was accepted.
    (both,) = plan(replace(SMALL, drafting=Drafting(2, LAYER)), UNIT, request).layouts
    assert both.attention_compute_s - without.attention_compute_s == pytest.approx(2 * 2 * 3 * 1.75 * 10 * 3 * 12)
    assert both.weight_bytes - without.weight_bytes == 2 * 2 * 200


def test_without_drafts_nothing_is_different():
    """Neither the layer that drafts nor the acceptance counts."""
    for users in (1, 64):
        request = Request(context=8192, users=users, weight_dtype="fp8", cache_dtype="bf16", tp=8)
        plain = plan(V3, H200, request)
        other = plan(V3_MTP, H200, replace(request, acceptance=0.1))
        assert other.layouts == plain.layouts
        assert other.notes == plain.notes
        assert all(row.tokens_per_step == 1 and row.drafting_s == 0 for row in plain.layouts)


def test_the_layer_of_v3_and_its_cache():
    """Its weights are split like those of a model: the attention's where whole heads lie, experts over all."""
    request = Request(context=8192, users=64, weight_dtype=AS_STORED, cache_dtype="bf16", tp=8, draft_tokens=1)
    model = replace(V3_MTP, stored=V3_STORED)
    for row, without in zip(
        plan(model, H200, request).layouts, plan(replace(model, drafting=None), H200, request).layouts, strict=True
    ):
        assert row.cache_bytes_per_user / without.cache_bytes_per_user == pytest.approx(62 / 61)
        more = row.weight_bytes - without.weight_bytes
        split = 1 if row.layout == "experts" else 8
        dense = V3_LAYER.weights.dense - V3_LAYER.head_values * (row.layout == "data")
        least = V3_LAYER.weights.experts / 8 + dense / split + V3_LAYER.head_values * (row.layout == "data")
        assert least < more < 1.35 * least  # W_kc and W_v beside it, and its share of what is in bf16
        assert 0 < row.drafting_s < row.step_s / 20


def test_tokens_that_are_accepted():
    base = Request(context=4096, users=64, weight_dtype="fp8", cache_dtype="bf16", tp=8, draft_tokens=3)
    made = [plan(V3_MTP, H200, replace(base, acceptance=a)).layouts[2] for a in (0.0, 0.5, 1.0)]
    assert [row.tokens_per_step for row in made] == [1, 1.875, 4]
    assert made[0].tokens_per_s < made[1].tokens_per_s < made[2].tokens_per_s
    longer = [plan(V3_MTP, H200, replace(base, draft_tokens=n)).layouts[2] for n in range(5)]
    assert sorted(row.step_s for row in longer) == [row.step_s for row in longer]
    assert sorted(row.weight_bytes for row in longer) == [row.weight_bytes for row in longer]
    # What is never accepted only costs.
    never, none = (plan(V3_MTP, H200, replace(base, acceptance=0.0, draft_tokens=n)).layouts[2] for n in (1, 0))
    assert never.tokens_per_s < none.tokens_per_s


def test_a_published_gain():
    """DeepSeek-V3's paper (arXiv 2412.19437, 5.4): 85 to 90 % of second tokens are accepted, 1.8 times the tokens."""
    request = Request(context=4096, users=256, weight_dtype="fp8", cache_dtype="bf16", tp=8)
    for acceptance in (0.85, 0.9):
        asked = [replace(request, draft_tokens=n, acceptance=acceptance) for n in (0, 1)]
        once, twice = (max(row.most_tokens_per_s for row in plan(V3_MTP, H200, one).layouts) for one in asked)
        assert 1.7 < twice / once < 1 + acceptance
    # Few tokens take few experts: two tokens of each of eight users read nearly twice as many.
    few = replace(request, users=8)
    once, twice = (plan(V3_MTP, H200, replace(few, draft_tokens=n)).layouts[0].tokens_per_s for n in (0, 1))
    assert once < twice < 1.2 * once


def test_lists_of_keys_are_taken_to_be_the_same():
    """Of sparse attention a step reads J rows and all keys of the indexer once, whatever is drafted."""
    request = Request(context=65536, users=8, weight_dtype="fp8", cache_dtype="bf16")
    (one,), (two,) = (plan(V3_2, H200, replace(request, draft_tokens=n)).layouts for n in (0, 1))
    assert two.choosing_memory_s == one.choosing_memory_s
    assert two.choosing_compute_s == 2 * one.choosing_compute_s
    assert two.attention_compute_s == pytest.approx(2 * one.attention_compute_s)
    rows = 61 * 8 * 2 * 2048 * 576 / H200.bandwidth
    assert two.cache_memory_s - one.cache_memory_s == pytest.approx(one.cache_memory_s - rows)


def test_what_is_sent_is_of_all_tokens():
    request = Request(context=4096, users=64, tp=8)
    for draft_tokens in (1, 3):
        for row, one in zip(
            plan(V3, H200, replace(request, draft_tokens=draft_tokens)).layouts,
            plan(V3, H200, request).layouts,
            strict=True,
        ):
            assert row.network_bytes == pytest.approx((1 + draft_tokens) * one.network_bytes)


def test_users_that_no_machine_shares_are_computed_on_one():
    """One user of eight machines: dense weights are multiplied by the machine that has the user."""
    request = Request(context=1, users=1, tp=8)
    rows = {row.layout: row.weight_compute_s * H200.peak("bf16") for row in plan(V3, H200, request).layouts}
    experts, logits = V3_WEIGHTS.active - V3_WEIGHTS.dense, 129_280 * 7168
    assert rows["replicated"] == rows["context"] == pytest.approx(2 * V3_WEIGHTS.active / 8)
    assert rows["experts"] == pytest.approx(2 * (V3_WEIGHTS.dense + experts / 8))
    assert rows["data"] == pytest.approx(2 * (V3.head_values + (V3_WEIGHTS.active - V3.head_values) / 8))
    assert logits < V3_WEIGHTS.dense


def test_notes_say_what_is_known_of_drafting():
    (note,) = plan(V3, H200, Request(draft_tokens=1)).notes
    assert note == "the config names no layers that draft (multi-token prediction): only verifying is counted"
    (note,) = plan(V3_MTP, H200, Request(draft_tokens=1)).notes
    assert note == "tokens are drafted by one more layer with 11.61 billion weights, assumed to be like the last"
    (note,) = plan(replace(V3, drafting=Drafting(2, V3_LAYER)), H200, Request(draft_tokens=1)).notes
    assert note.startswith("tokens are drafted by 2 more layers, each with 11.61 billion weights")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"draft_tokens": -1}, "draft_tokens is -1, expected a whole number from 0 to 64"),
        ({"draft_tokens": 65}, "draft_tokens is 65"),
        ({"acceptance": -0.1}, "acceptance is -0.1, expected a probability from 0 to 1"),
        ({"acceptance": 1.01}, "acceptance is 1.01"),
        ({"acceptance": float("nan")}, "acceptance is nan"),
        ({"prompt": 0}, "prompt is 0, expected from 1 to the 4,096 tokens of context"),
        ({"prompt": 4097}, "prompt is 4097"),
        ({"output": 0}, "output is 0, expected a whole number from 1"),
    ],
)
def test_tokens_that_no_step_has(asked, text):
    with pytest.raises(InputError, match=text):
        plan(V3, H200, Request(context=4096, **asked))


def test_every_letter_has_a_meaning():
    for layout in step_formulas.LABELS:
        for latent in (True, False):
            for prompt in (True, False):
                for expression in step_formulas.expressions(layout, latent=latent, prompt=prompt).values():
                    assert expression.free_symbols <= set(step_formulas.MEANING)
