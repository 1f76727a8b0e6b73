"""Caches whose rows ranks share: the tokens of one process, and of everything else the share that one computes."""

from __future__ import annotations

import os

import pytest

from tests.distributed import context_jobs as jobs
from tests.support.planned import context_bytes
from tests.support.tiers import also, full

# Of one process: L=64 R=16, 2 (2L+R) FLOPs per head and cached token, L+R values; two sequences, float32.
FLOPS, ROWS, BATCH, BYTES, PROMPT = 288, 80, 2, 4, 9
RESULT = 65  # L + 1
LONG = os.environ.get("MLA_RANKS") == "long"
STEPS, LOAD = (64, 200) if LONG else (8, 30)
# Where ranks have other heads each, more happens; that copies of a model share a cache is shown by their tokens.
HOW = ["copies", "heads"] if LONG else ["heads"]


@pytest.mark.parametrize(
    ("count", "family", "layers", "how", "steps", "all_heads"),
    [
        (2, "deepseek_v3", 1, "heads", STEPS, 4),
        *also(
            "family",
            (2, "deepseek_v3", 2, "copies", STEPS, 4),
            (2, "minicpm3", 1, "heads", STEPS, 4),
            (4, "deepseek_v2", 1, "grid", STEPS, 4),
            (4, "deepseek_v3", 1, "heads", STEPS, 8),
        ),
    ],
)
def test_the_tokens_of_one_process_and_what_is_refused(ranks, count, family, layers, how, steps, all_heads):
    """What is refused of a cache is asked once, of the first of these."""
    refused = (count, family, how) == (2, "deepseek_v3", "heads")
    context, heads = {
        "copies": (count, all_heads), "heads": (count, all_heads // count), "grid": (2, all_heads // 2)
    }[how]  # fmt: skip
    tokens = PROMPT + steps - 1
    sent = layers * BATCH * BYTES
    owned = []
    for found in ranks(count).run(jobs.shared_context, family, layers, steps, how, all_heads, refused):
        assert found["tokens"]
        assert found["logits"] < 1e-5
        assert found["codes"][0] == "absorbed"
        assert set(found["codes"]) <= {"absorbed", "cost_prefill", "cost_latent_wide"}
        assert found["shown"] == {tokens}
        owned.append(found["values"])
        received = found["received"]
        if how == "heads":  # queries of all heads, over the own rows; results of the own heads
            assert found["flops"] == FLOPS * all_heads / context
            exchanged = received["all_gather_into_tensor"] + received["all_to_all_single"]
            assert exchanged / layers == pytest.approx(context_bytes(BATCH, context, all_heads), rel=0.02)
            assert received.pop("all_gather_into_tensor") == sent * (context - 1) * heads * ROWS
            assert received.pop("all_to_all_single") == sent * (context - 1) * heads * RESULT
        else:
            assert found["flops"] == FLOPS * heads / context
            assert received.pop("all_gather_into_tensor") == sent * (context - 1) * heads * RESULT
        assert received.keys() <= {"all_reduce"}, "those of the model"
        if refused:
            assert_refused(found["refused"])
    each = sorted({BATCH * ROWS * (tokens // context), BATCH * ROWS * -(-tokens // context)})
    assert sorted(set(owned)) == each
    assert sum(owned) == BATCH * ROWS * tokens * count // context


def assert_refused(found):
    for name in ("read", "written", "saved", "array", "last", "original", "one rank"):
        assert "SharedCacheError" in found[name], name
        assert "this rank has 1/2 of the rows of this cache: call full_tensor() on all ranks" in found[name]
    for name in ("two axes", "not among them", "no mesh", "alone", "program"):
        assert found[name].startswith("OptionError: context_parallel"), name
    assert "compiled for one rank" in found["one rank"]
    assert found["one rank in the mesh"] == "True"


@full("family")  # than the growing cache above
@pytest.mark.parametrize(
    ("family", "layers", "how", "heads"),
    [("deepseek_v3", 1, "heads", 2), *also("family", ("deepseek_v3", 2, "copies", 4), ("minicpm3", 2, "heads", 2))],
)
def test_a_static_cache(ranks, family, layers, how, heads):
    steps, sent = max(STEPS, 12), layers * BATCH * BYTES
    length = PROMPT + steps - 1
    for found in ranks(2).run(jobs.shared_static, family, layers, steps, how):
        assert found["tokens"]
        assert found["logits"] < 1e-5
        assert found["graphs"] == 2, "a prompt, and one graph for every step"
        assert not found["waits"]
        assert found["lie_alike"] == [1] * 2 * layers
        assert not found["said"]
        assert found["length"] == length
        assert found["shown"] == {length}
        assert found["bytes"] == BATCH * BYTES * ROWS * length / 2, "memory and all"
        assert found["flops"] == BATCH * FLOPS * 4 * length / 2
        received = found["received"]
        if how == "heads":
            exchanged = received["all_gather_into_tensor"] + received["all_to_all_single"]
            assert exchanged / layers == pytest.approx(context_bytes(BATCH, 2, 4), rel=0.02)
            assert received.pop("all_gather_into_tensor") == sent * heads * ROWS
            assert received.pop("all_to_all_single") == sent * heads * RESULT
        else:
            assert received.pop("all_gather_into_tensor") == sent * heads * RESULT
        assert received.keys() <= {"all_reduce"}, "those of the model"


@full("combination")
@pytest.mark.parametrize(("static", "calls"), [(False, 23), (True, 25)])
@pytest.mark.parametrize("how", HOW)
def test_what_callers_do_to_a_cache(ranks, how, static, calls):
    for found in ranks(2).run(jobs.cache_operations, how, static):
        assert found["off"] < 1e-5
        assert found["calls"] == calls
        assert not found["said"]


@full("combination")
def test_beams(ranks):
    for found in ranks(2).run(jobs.beams):
        assert found == [True, True]


@full("combination")
def test_a_static_cache_that_is_full(ranks):
    for alone, shared in ranks(2).run(jobs.beyond_the_end):
        assert alone.startswith("IndexError")
        assert shared.startswith("IndexError"), "on every rank: none waits for another"


@full("combination")
def test_views_of_a_static_cache(ranks):
    for found in ranks(2).run(jobs.views_of_rows, True):
        assert found["alike"]
        assert not found["error"]
        assert any(text.startswith("context_parallel: each rank has all") for text in found["said"])
    for found in ranks(2).run(jobs.views_of_rows, False):
        assert found["error"].startswith("a graph writes to it and returns a view of it, and this rank has 1/2")
        assert any("gathered in every call" in text and "is returned" in text for text in found["said"])


@full("combination")
def test_steps_that_need_all_rows_of_a_static_cache(ranks):
    for found in ranks(2).run(jobs.gathered_in_steps):
        assert found["tokens"]
        (said,) = found["said"]
        assert "gathered in every call of this graph: no attention is absorbed" in said
        assert found["held"] == 6, "of 12 rows"


@full("combination")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_several_queries_in_a_call(ranks, how, static):
    for found in ranks(2).run(jobs.several_queries, how, static):
        assert found["off"] < 1e-5
        assert found["codes"] == ["absorbed"]
        assert sum("keeps its share" in text and "a call receives" in text for text in found["messages"]) == 2


@full("combination")
def test_ranks_whose_heads_differ_send_their_queries(ranks):
    for found in ranks(2).run(jobs.heads_in_another_order):
        assert found["tokens"]
        assert any("receives are queries and results of other ranks" in text for text in found["messages"])


@full("inductor")
@pytest.mark.parametrize(
    ("dtype", "length"),
    [("bfloat16", None), ("float32", 16), *([("float32", None), ("bfloat16", 16)] if LONG else [])],
)
def test_compiled(ranks, dtype, length):
    for found in ranks(2).run(jobs.compiled_context, dtype, length):
        assert found["graphs"] == 2, "a prompt, and one graph for every step"
        assert found["off"] < (1e-5 if dtype == "float32" else 3e-2)
        assert found["error"] < 1.2 * found["error_alone"], "no more than without shares"


@full("combination")
def test_a_cache_that_is_not_shared_is_right_and_said(ranks):
    for found in ranks(2).run(jobs.cache_that_was_there):
        assert found["tokens"]
        assert found["said"] == [
            text for text in found["said"] if text.startswith("context_parallel: each rank has all")
        ]
        assert found["said"]


@full("family")
def test_a_cache_filled_under_another_mesh(ranks):
    for text in ranks(4).run(jobs.another_mesh):
        assert "SharedCacheError: a model compiled for other ranks reads it, and this rank has 1/2 of the rows" in text


@full("combination")
def test_a_rank_that_dies(ranks):
    pool = ranks(2)
    (text, works_on), ended = pool.run(jobs.dies_sharing, 1, 6)
    pool.stop()
    assert ended is None
    assert text.startswith("after 7: "), text
    assert works_on


@full("draws")
def test_pairs_of_ranks_under_load(ranks):
    pool = ranks(4)
    *found, ended = pool.run(jobs.pairs_under_load, LOAD, 3)
    pool.stop()
    assert ended is None
    first, _, second = found
    assert all(one["tokens"] and "absorbed" in one["codes"] for one in found)
    assert first["lengths"] != second["lengths"]
    assert [one["told"] for one in found[:2]] == ["", ""], "the other pair does not need the rank that ended"
    assert second["told"].startswith("after 6: ")


@full("combination")
def test_an_option_of_torch_compile(ranks):
    for found in ranks(2).run(jobs.through_the_backend):
        assert found == {"tokens": True, "held": 6}, "of 12 tokens"
