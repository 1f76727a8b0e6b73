"""Many users of a model whose heads are shared by ranks: the tokens of one process, or the same errors on all."""

from __future__ import annotations

import pytest

from tests.distributed import jobs, serving_jobs
from tests.support.planned import context_bytes
from tests.support.tiers import also, full

# Of one process: H=4 L=64 R=16, 2 H (2L+R) FLOPs per cached token, L+R values of 4 bytes.
HEADS, FLOPS, BYTES = 4, 1_152, 320
ROWS, RESULT = 80, 65  # L+R, L+1
CHOSEN, KEY = 8, 96  # of the indexer: rows of a list, bytes of a key


@full("combination")  # of less than what ranks that share pages show
@pytest.mark.parametrize(("family", "how", "verify"), [("deepseek_v3", "heads", False), ("minicpm3", "plan", True)])
def test_the_tokens_of_one_process(ranks, tmp_path, family, how, verify):
    directory = str(tmp_path) if how == "plan" else None
    if directory is not None:
        jobs.saved(family, directory, **serving_jobs.CONFIG)
    for rank, found in enumerate(ranks(2).run(serving_jobs.served, family, directory, verify, 1)):
        assert found["tokens"]
        assert found["sites"] == [("absorbed", HEADS // 2, FLOPS // 2)] * 2  # a step, a prompt
        assert found["bytes"] == BYTES
        unknown = "the prompt holds 199, expected token ids below 199"
        assert found["fails"]["on all ranks"] == [True, "this prompt is poison", unknown]
        told = "a step failed on some ranks and not on others: "
        told += "ValueError: this prompt is poison" if rank == 1 else "another rank"
        assert found["fails"]["on one rank"] == [told, told, unknown]
        assert found["fails"]["on none"] == [True, True, unknown]


@full("family")  # tests/passes/cache/test_share.py shares pages in one process
@pytest.mark.parametrize(
    ("count", "family", "how", "verify"),
    [
        (2, "deepseek_v3", "heads", False),
        *also(
            "family",
            (2, "deepseek_v3", "copies", True),
            (2, "minicpm3", "copies", True),
            (2, "deepseek_v32", "heads", True),
            (4, "deepseek_v2", "grid", True),
        ),
    ],
)
def test_pages_that_ranks_share(ranks, count, family, how, verify):
    context, chosen = 2, CHOSEN if family == "deepseek_v32" else 0
    for rank, found in enumerate(ranks(count).run(serving_jobs.shared_pages, family, how, verify, 1)):
        assert found["tokens"]
        assert found["crowded"]
        assert found["forked"] == [True] * 4
        assert found["codes"] == ["absorbed"] * 2
        assert found["said"] == [f"each of {context} ranks keeps its share of the rows in its pages"]
        assert found["bytes"] == (BYTES + (KEY if chosen else 0)) // context
        # Of a list each rank looks at the entries that are its own; the formula counts them all.
        assert found["flops"] == (FLOPS * chosen / serving_jobs.ROOM if chosen else FLOPS / count)
        heads = HEADS if how == "copies" else HEADS // 2  # of each rank
        received, values = found["received"], (context - 1) * heads * 4
        if how == "heads":
            exchanged = received["all_gather_into_tensor"] + received["all_to_all_single"]
            assert exchanged == pytest.approx(context_bytes(1, context, HEADS, chosen), rel=0.02)
            assert received.pop("all_to_all_single") == values * RESULT
            assert received.pop("all_gather_into_tensor") == values * ROWS + (context - 1) * chosen * 8
        else:
            assert received.pop("all_gather_into_tensor") == values * RESULT
        assert received.keys() == (set() if how == "copies" else {"all_reduce"}), "those of the model"
        assert found["fails"]["on all ranks"][:2] == [True, "this prompt is poison"]
        told = "ValueError: this prompt is poison" if rank == 1 else "another rank"
        told = f"a step failed on some ranks and not on others: {told}"
        assert found["fails"]["on one rank"][:2] == [told, told]
        assert found["fails"]["on none"][:2] == [True, True]


def test_a_context_of_ranks_that_run_other_steps(ranks):
    for said in ranks(4).run(serving_jobs.other_meshes):
        assert said.startswith("OptionError: context_parallel is ")
        assert "otherwise it is unknown which ranks run the same steps" in said


@full("combination")
def test_no_rank_absorbs_what_one_leaves(ranks):
    first, second = ranks(2).run(serving_jobs.another_verdict, 1)
    assert first.startswith("CaptureError: no attention of DeepseekV3ForCausalLM can be decoded in absorbed form: ")
    assert "ranks_differ: rank 1: verify_failed: is told to differ" in first
    assert second.startswith("CaptureError: ")
    assert "verify_failed: is told to differ" in second


@full("combination")
def test_a_rank_that_fails_tells_the_others(ranks):
    first, second = ranks(2).run(serving_jobs.a_rank_that_cannot, 0)
    assert first == "CaptureError: this rank has had enough"
    told = "because another rank cannot: rank 0: ExportError: this rank has had enough"
    assert second == f"CaptureError: DeepseekV3ForCausalLM is not served, {told}"
