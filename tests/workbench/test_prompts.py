"""Prompts: their floor by hand, against steps, and against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_compile.passes.cost import formulas
from mla_compile.workbench import step_formulas
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import AS_STORED, Request
from tests.support.facts import GROUPED, V3, V3_2, V3_DIMS, V3_MTP, V3_STORED, V3_WEIGHTS
from tests.workbench.test_drafting import SMALL, UNIT

H200 = machine("h200")
LOGITS = 7168 * 129_280


def test_prompts_by_hand():
    """5 prompts of 4 tokens, each of which sees those before it: 10 pairs a head. Logits are of one token each."""
    request = Request(context=9, users=5, prompt=4)
    (row,) = plan(SMALL, UNIT, request).layouts
    floor = row.prefill.floor
    assert floor.attention_compute_s == 2 * 2 * 5 * 10 * 3 * (4 + 2 + 6)
    assert floor.cache_memory_s == 2 * 2 * 5 * min(4 * 2 * 3 * 12, 4 * 7 + 4 * 3 * 12)
    assert floor.weight_compute_s == 2 * 5 * (4 * (900 - 77) + 77)
    assert floor.weight_memory_s == 2 * 900
    assert row.prefill.step_s == floor.attention_s + floor.weights_s
    assert row.prefill.tokens_per_s == pytest.approx(20 / row.prefill.step_s)
    (one,) = plan(SMALL, UNIT, replace(request, users=1)).layouts
    assert row.prefill.first_token_s == one.prefill.step_s == one.prefill.first_token_s


def test_prompts_of_heads_that_share_keys():
    (row,) = plan(GROUPED, UNIT, Request(context=7, users=3)).layouts
    assert row.prefill.floor.attention_compute_s == 80 * 2 * 3 * 28 * 64 * 256
    assert row.prefill.floor.cache_memory_s == 80 * 2 * 3 * 7 * (8 + 64) * 256


@pytest.mark.parametrize("tokens", [1, 4096, 131072])
def test_flops_of_v3(tokens):
    """Twice its 37 billion active weights a token, without the logits; 128 heads of 192 + 128 over half the pairs."""
    floor = plan(V3, H200, Request(context=tokens, users=1)).layouts[0].prefill.floor
    weights = floor.weight_compute_s * H200.peak("bf16")
    assert weights == pytest.approx(2 * (tokens * (V3_WEIGHTS.active - LOGITS) + LOGITS))
    assert weights / tokens == pytest.approx(2 * 37e9, rel=0.05)
    attention = floor.attention_compute_s * H200.peak("bf16")
    assert attention == pytest.approx(61 * 2 * 128 * (192 + 128) * tokens * (tokens + 1) / 2)


def test_a_causal_prompt_is_half_of_what_the_decision_counts():
    """The formulas of `passes/decide` count masked scores too."""
    (stage,) = (stage for stage in formulas.stages("expanded") if stage.name == "attention")
    full = formulas.evaluate(2 * stage.multiply_adds, V3_DIMS, B=1, S=4096, T=4096)
    floor = plan(V3, H200, Request(context=4096, users=1)).layouts[0].prefill.floor
    assert floor.attention_compute_s * H200.peak("bf16") == pytest.approx(61 * full * 4097 / 8192)


def test_prompts_that_choose_their_keys():
    """Short ones are expanded like all others; of long ones each token attends to 2,048 rows, absorbed."""
    for tokens in (512, 2048, 8192):
        request = Request(context=tokens, users=1)
        sparse, dense = (plan(model, H200, request).layouts[0].prefill.floor for model in (V3_2, V3))
        assert sparse.attention_compute_s == pytest.approx(dense.attention_compute_s)
    tokens = 131072
    floor = plan(V3_2, H200, Request(context=tokens, users=1)).layouts[0].prefill.floor
    pairs = sum(min(i, 2048) for i in range(1, tokens + 1))
    assert floor.attention_compute_s * H200.peak("bf16") == pytest.approx(61 * 2 * 128 * (2 * 512 + 64) * pairs)
    ranked = 61 * 2 * 64 * 129 * tokens * (tokens + 1) / 2
    assert floor.choosing_compute_s * H200.peak("bf16") == pytest.approx(ranked)
    assert floor.choosing_memory_s == pytest.approx(61 * tokens * 256 / H200.bandwidth)
    for tokens, fewer in ((12288, False), (16384, True)):
        request = Request(context=tokens, users=1)
        sparse, dense = (plan(m, H200, request).layouts[0].prefill.floor for m in (V3_2, V3))
        assert (sparse.attention_compute_s < 0.99 * dense.attention_compute_s) == fewer


def test_layouts_share_a_prompt():
    """By heads all work on one prompt; by users each has its own, and one alone keeps the others waiting."""
    request = Request(context=16384, users=64, weight_dtype="fp8", cache_dtype="bf16", tp=8)
    rows = {row.layout: row.prefill for row in plan(V3, H200, request).layouts}
    assert rows["context"] == rows["replicated"]
    computed = [row.floor.attention_compute_s for row in rows.values()]
    assert computed == pytest.approx([computed[0]] * 4)
    alone = plan(V3, H200, replace(request, tp=1)).layouts[0].prefill
    for name, row in rows.items():
        assert row.floor.weight_compute_s == pytest.approx(alone.floor.weight_compute_s / 8)
        assert row.tokens_per_s <= row.most_tokens_per_s <= 8 * alone.most_tokens_per_s * (1 + 1e-9)
        assert (row.first_token_s > 3 * rows["replicated"].first_token_s) == step_formulas.by_user(name)


def test_prompts_read_weights_as_stored():
    """K and V of a prompt are made by the up-projection itself, and not by what absorbing keeps beside it."""
    model = replace(V3, stored=V3_STORED)
    (row,) = plan(model, H200, Request(context=8192, users=64, weight_dtype=AS_STORED)).layouts
    read = V3_STORED.bytes - V3_STORED.lookup_bytes
    assert row.prefill.floor.weight_memory_s * H200.bandwidth == pytest.approx(read)


def test_the_layer_that_drafts_reads_prompts_too():
    request = Request(context=8192, users=8, draft_tokens=1)
    (plain,), (row,) = (plan(model, H200, request).layouts for model in (V3, V3_MTP))
    assert row.prefill.floor.attention_s == pytest.approx(62 / 61 * plain.prefill.floor.attention_s)


def test_prompt_tokens_grow_scarcer_with_the_length():
    request = Request(users=8, weight_dtype="fp8", cache_dtype="bf16", tp=8)
    made = [plan(V3, H200, replace(request, context=n)).layouts[3].prefill for n in (1024, 8192, 65536)]
    assert made[0].most_tokens_per_s > made[1].most_tokens_per_s > made[2].most_tokens_per_s
    assert made[0].first_token_s < made[1].first_token_s < made[2].first_token_s


def test_machines_that_also_read_the_prompts():
    """2,000 tokens for a prompt of 6,000: the time of the prompts and that of the steps, one after the other."""
    request = Request(context=8192, users=64, weight_dtype="fp8", cache_dtype="bf16", tp=8, prompt=6000, output=2000)
    for row in plan(V3, H200, request).layouts:
        seconds = 6000 / row.prefill.tokens_per_s + 2000 / row.tokens_per_s
        assert row.served_tokens_per_s == pytest.approx(2000 / seconds)
        assert row.served_tokens_per_s < row.tokens_per_s
        # The bound is of the busiest of memory, arithmetic and links, over both.
        least = max(6000 / row.prefill.most_tokens_per_s, 2000 / row.most_tokens_per_s)
        assert 1 / (least / 2000) >= row.most_served_tokens_per_s > row.served_tokens_per_s
    long, short = (plan(V3, H200, replace(request, output=n)).layouts[2].served_tokens_per_s for n in (10**6, 10))
    assert short < long < plan(V3, H200, request).layouts[2].tokens_per_s
    assert long == pytest.approx(plan(V3, H200, request).layouts[2].tokens_per_s, rel=0.02)
    assert plan(V3, H200, replace(request, output=None)).layouts[0].served_tokens_per_s is None
    drafted = plan(V3_MTP, H200, replace(request, draft_tokens=1)).layouts[2]
    seconds = 6000 / drafted.prefill.tokens_per_s + 2000 / drafted.tokens_per_s
    assert drafted.served_tokens_per_s == pytest.approx(2000 / seconds)


# Input tokens per second and GPU. DeepSeek's own of 32 H800 (planned as H100) include 56 % that were cached already
# (https://aiposthub.cc/5152). SGLang's are of 32 H100 (https://lmsys.org/blog/2025-05-05-large-scale-ep) and of eight
# GPUs of a GB200 NVL72 (https://lmsys.org/blog/2025-09-25-gb200-part-2), in fp8 and bf16, and in NVFP4 and fp8.
@pytest.mark.parametrize(
    ("gpu", "count", "tokens", "weights", "rows", "published"),
    [
        ("h100", 32, 4989, "fp8", "bf16", 73700 / 8),
        ("h100", 32, 2000, "fp8", "bf16", 52300 / 8),
        ("gb200", 8, 2000, "fp8", "bf16", 18471),
        ("gb200", 8, 2000, "fp4", "fp8", 26156),
    ],
)
def test_what_was_published_is_below_the_bound(gpu, count, tokens, weights, rows, published):
    request = Request(context=tokens, users=8 * count, weight_dtype=weights, cache_dtype=rows, tp=count)
    best = max(row.prefill.most_tokens_per_s / count for row in plan(V3, machine(gpu), request).layouts)
    assert published < best < 4 * published
