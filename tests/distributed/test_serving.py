"""Many users of a model whose heads are shared by ranks: the tokens of one process, or the same errors on all."""

from __future__ import annotations

import pytest

from tests.distributed import jobs, serving_jobs

# Of one process: H=4 L=64 R=16, 2 H (2L+R) FLOPs per cached token, L+R values of 4 bytes.
HEADS, FLOPS, BYTES = 4, 1_152, 320


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


def test_no_rank_absorbs_what_one_leaves(ranks):
    first, second = ranks(2).run(serving_jobs.another_verdict, 1)
    assert first.startswith("CaptureError: no attention of DeepseekV3ForCausalLM can be decoded in absorbed form: ")
    assert "ranks_differ: rank 1: verify_failed: is told to differ" in first
    assert second.startswith("CaptureError: ")
    assert "verify_failed: is told to differ" in second


def test_a_rank_that_fails_tells_the_others(ranks):
    first, second = ranks(2).run(serving_jobs.a_rank_that_cannot, 0)
    assert first == "CaptureError: this rank has had enough"
    told = "because another rank cannot: rank 0: ExportError: this rank has had enough"
    assert second == f"CaptureError: DeepseekV3ForCausalLM is not served, {told}"
