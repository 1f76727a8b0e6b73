"""Models whose heads are shared by ranks: the tokens of one process, all attentions absorbed, on every rank."""

from __future__ import annotations

import os

import pytest

from mla_compile.codes import Code
from tests.distributed import jobs
from tests.support import latent_modules
from tests.support.tiers import also, full

# Of one process: H=4 L=64 R=16, 2 H (2L+R) FLOPs per cached token.
HEADS, FLOPS, ROWS = 4, 1_152, 80
STEPS = 64 if os.environ.get("MLA_RANKS") == "long" else 6
# What ranks agree on before they run a graph together.
FAMILIES = ["one attention", *also("family", "deepseek_v3")]


@pytest.mark.parametrize(
    ("count", "family", "layers", "how", "door", "steps"),
    [
        # Of heads through the other door: the tests below.
        (2, "deepseek_v3", 1, "heads", "backend", STEPS),
        *also(
            "family",
            (2, "deepseek_v3", 2, "heads", "optimize", STEPS),
            (2, "deepseek_v2", 1, "plan", "optimize", STEPS),
            (2, "minicpm3", 1, "plan", "backend", STEPS),
            (2, "minicpm3", 1, "fsdp", "optimize", STEPS),
            (2, "deepseek_v3", 2, "fsdp", "optimize", STEPS),
            (2, "deepseek_v3", 1, "fsdp", "optimize", 2),  # a prompt and a step
            # One head a rank: rows are wider than its K and V.
            (4, "minicpm3", 1, "heads", "optimize", STEPS),
        ),
    ],
)
def test_the_tokens_of_one_process(ranks, tmp_path, count, family, layers, how, door, steps):
    if how == "plan":
        jobs.saved(family, str(tmp_path), num_hidden_layers=layers)
    share = 1 if how == "fsdp" else count
    for found in ranks(count).run(jobs.same_as_one_process, family, layers, how, str(tmp_path), steps, door):
        assert found["tokens"]
        assert found["logits"] < 1e-5
        prompt = "cost_latent_wide" if share == HEADS else "cost_prefill"
        assert found["codes"] == ["absorbed", prompt]
        assert set(found["absorbed"]) == {(HEADS // share, FLOPS // share, ROWS)}


@full("inductor")
@pytest.mark.parametrize("how", ["plan", "heads", "fsdp"])
def test_the_tokens_of_one_process_through_inductor(ranks, tmp_path, how):
    """Which lays out the collectives of a model itself, and an embedding that is divided among ranks."""
    if how == "plan":
        jobs.saved("deepseek_v3", str(tmp_path), num_hidden_layers=1)
    for found in ranks(2).run(
        jobs.same_as_one_process, "deepseek_v3", 1, how, str(tmp_path), 3, "optimize", "inductor"
    ):
        assert found["tokens"]
        assert found["logits"] < 1e-5
        assert "absorbed" in found["codes"]
        assert "code_failed" not in found["codes"]


def test_weights_that_ranks_have_shares_of(ranks):
    """Of models of transformers: above."""
    H, rows = latent_modules.H, latent_modules.L + latent_modules.R
    for found in ranks(2).run(jobs.sharded):
        assert found["off"] < 1e-10
        assert found["absorbed"] == [(H, rows)]


@full("family")
def test_rows_that_heads_share_where_ranks_have_shares_of_weights(ranks):
    """DeepSeek-V4: all three kinds of layers, past a row for 8 tokens. A prompt keeps its own form."""
    pytest.importorskip("transformers.models.deepseek_v4")
    for found in ranks(2).run(jobs.shared_rows, 12):
        assert found["tokens"]
        assert found["logits"] < 1e-6  # norms of the model are in float32
        assert found["codes"] == {Code.SHARED_ROWS}
        prompt, steps = found["operators"][:3], found["operators"][3:]  # each layer is a graph by itself
        assert not any(prompt)
        assert steps
        assert all(steps)


@full("inductor")
def test_layers_of_one_kind_are_compiled_once_on_every_rank(ranks):
    for found in ranks(2).run(jobs.layers_once):
        assert found["tokens"]
        assert max(found["collectives"]) == 1, "the sum over the heads of one layer"
        assert len(found["collectives"]) % 3 == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_leave_what_one_leaves(ranks, family):
    first, second = ranks(2).run(jobs.another_verdict, 1, family)
    assert first["alike"]
    assert second["alike"]
    assert ("ranks_differ", "rank 1: verify_failed: is told to differ") in first["sites"]
    assert ("verify_failed", "is told to differ") in second["sites"]
    assert not any(code == "absorbed" for code, _ in (*first["sites"], *second["sites"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_fails_tells_the_others(ranks, family):
    first, second = ranks(2).run(jobs.a_failure, 0, False, family)
    assert first["alike"]
    assert second["alike"]
    assert any("this rank has had enough" in text for text in first["said"])
    assert any("rank 0: CaptureError: this rank has had enough" in text for text in second["said"])
    assert not first["sites"]
    assert not second["sites"]


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_ranks_all_raise(ranks, family):
    for found in ranks(2).run(jobs.a_failure, 1, True, family):
        assert "this rank has had enough" in found["raised"]


@pytest.mark.parametrize("family", FAMILIES)
def test_options_that_differ_are_an_error_on_every_rank(ranks, family):
    for text in ranks(2).run(jobs.other_options, family):
        assert "RankError" in text
        assert "fold: rank 0: 'auto'; rank 1: 'always'" in text


def test_heads_that_cannot_be_divided(ranks):
    assert all("invalid for input of size" in text for text in ranks(2).run(jobs.heads_that_cannot_be_divided))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_does_not_come(ranks, family):
    pool = ranks(2)
    text, _ = pool.run(jobs.alone, family)
    pool.stop()  # these ranks no longer agree on how often they met
    assert "RankError: rank 0 compiles a graph that it runs together with rank 1" in text
    assert 'ranks="alone"' in text


@full("combination")  # of an error of gloo and our ranks
def test_a_rank_that_dies(ranks):
    pool = ranks(2)
    text, ended = pool.run(jobs.dies, 1, 6)
    pool.stop()
    assert ended is None
    assert text.startswith("after 7: "), text
