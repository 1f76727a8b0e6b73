"""Decode steps that are recorded and replayed, over a stand-in for CUDA graphs that keeps their rules."""

from __future__ import annotations

import copy

import pytest
import torch

import mla_compile
from mla_compile.batching import manager, replay
from tests.batching.conftest import serving
from tests.support import models, recording
from tests.support.serving import alone, prompts, results, running, tokens
from tests.support.tiers import also, full


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[recording.Graph]:
    """The graphs that are recorded, on a CPU that can."""
    graphs: list[recording.Graph] = []

    def create() -> recording.Graph:
        graphs.append(recording.Graph())
        return graphs[-1]

    monkeypatch.setattr(replay, "create_accelerator_graph", create)
    monkeypatch.setattr(replay, "accelerator_graph_capture_context", recording.record)
    monkeypatch.setattr(replay, "get_memory_pools", lambda: (None, 0))
    monkeypatch.setattr(manager, "can_record", lambda device: True)
    return graphs


def decoding(fast):
    return next(graph for graph in fast.mla_batching.graphs if graph.name == "decode")


@pytest.mark.parametrize("config", [{}, {"page": 4, "blocks": 200}, {"page": 8, "blocks": 12, "max_batch_tokens": 16}])
def test_many_users(served, expected, made, config):
    """Users come and go, and pages move: one recording for each size, replayed for all the other steps."""
    _, fast = served
    assert tokens(fast, prompts(), **config) == expected
    graph = decoding(fast)
    assert len(made) == len(graph.buckets) == graph.replayed.count > 1
    assert sum(one.replays for one in made) > 2 * len(made)
    assert str(graph).endswith(f"recordings: {len(made)}")


@full("family")
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2",
        "deepseek_v32",
        "minicpm3",
        "mistral4",
    ],
)
def test_no_step_of_a_family_waits(name, made):
    """Nothing is read back: complex rotations, experts, an indexer. A prompt comes in pieces."""
    model, fast = serving(name)
    ids = prompts((21, 5, 1, 40))
    assert tokens(fast, ids, new=6, max_batch_tokens=16) == [alone(model, one, 6) for one in ids]
    assert decoding(fast).replayed.count == len(made)
    assert sum(one.replays for one in made)


def test_rows_in_float8(made, monkeypatch):
    _, fast = serving("minicpm3", layers=1, cache_dtype="fp8", verify=False)
    assert fast.mla_batching.bytes_of_token == 64 + 4 * 4 + 16 * 4  # four scales
    ids = prompts((21, 5))
    got = tokens(fast, ids, new=4)
    assert sum(one.replays for one in made)
    monkeypatch.setattr(manager, "can_record", lambda device: False)
    fast.destroy_cached_continuous_batching_manager()
    assert tokens(fast, ids, new=4) == got


@pytest.mark.parametrize("fold", ["always", *also("combination", "never")])
def test_weights_that_change_are_followed(request, made, fold):
    """In place they are read where they lie; one that moved is seen, and the step recorded anew."""
    if fold == "always":
        model, fast = request.getfixturevalue("served")
    else:
        model = models.build("deepseek_v3", tie_word_embeddings=False, num_hidden_layers=1)
        fast = mla_compile.continuous_batching(model, codegen="eager", fold=fold, verify=False)
    ids = prompts((9,))[0]
    attention = fast.model.layers[0].self_attn
    expanding, out = attention.kv_b_proj.weight, attention.o_proj.weight
    assert bool(fast.mla_batching.steps._decode.folds) is (fold == "always")

    def answer(manager) -> list[int]:
        manager.add_request(ids)
        (found,) = results(manager, 1).values()
        return found.generated_tokens

    def other(weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.3

    kept = expanding.detach().clone(), out.data
    try:
        with running(fast) as server, torch.no_grad():
            assert answer(server) == alone(model, ids)
            count = len(made)
            expanding.copy_(other(expanding))
            changed = answer(server)
            assert changed == alone(model, ids)
            assert len(made) == count, "what was changed in place needs no new recording"
            out.data = other(out)
            assert answer(server) == alone(model, ids) != changed
            assert len(made) > count
    finally:
        with torch.no_grad():
            expanding.copy_(kept[0])
        out.data = kept[1]


@full("family")
def test_a_step_that_waits_is_not_recorded(made, caplog):
    """These experts are a loop that asks how many tokens each of them has."""
    model, fast = serving("longcat_flash")
    ids = prompts((9, 20))
    assert tokens(fast, ids) == [alone(model, one) for one in ids]
    assert decoding(fast).replayed.count == 0
    assert len(made) == len(decoding(fast).buckets), "each size was tried once"
    assert "cannot be recorded: operation not permitted when stream is capturing" in caplog.text


def test_a_call_that_waits_is_run_as_it_is(made, caplog):
    call = replay.Replayed(lambda x: [x * float(x.sum())], [0])
    found = [call(torch.full((2,), float(n)))[0].tolist() for n in range(4)]
    assert found == [[2.0 * n * n] * 2 for n in range(4)]
    assert len(made) == 1, "it was tried once"
    assert call.count == 0
    assert "cannot be recorded: operation not permitted when stream is capturing" in caplog.text


def test_results_are_not_overwritten_by_the_next_step(made):
    call = replay.Replayed(lambda x, w: [x * w], [0])
    weight = torch.full((2,), 3.0)
    found = [call(torch.full((2,), float(n)), weight)[0] for n in range(4)]
    assert [one.tolist() for one in found] == [[3.0 * n] * 2 for n in range(4)]
    assert [one.replays for one in made] == [3]


@pytest.mark.parametrize(("asked", "recorded"), [(None, True), (True, True), (False, False), ((True, False), False)])
def test_as_the_config_asks(served, made, asked, recorded):
    model, fast = served
    ids = prompts((9,))
    with running(fast, use_cuda_graph=asked) as server:
        server.add_request(ids[0])
        (found,) = results(server, 1).values()
        assert server.continuous_batching_config.use_cuda_graph == (False, False), "transformers records nothing"
    assert found.generated_tokens == alone(model, ids[0])
    assert bool(made) is recorded


def test_a_step_that_ran_unrecorded_before_is_recorded_when_asked(served, made):
    _, fast = served
    for asked in (False, True):
        assert not made
        with running(fast, use_cuda_graph=asked) as server:
            server.add_request(prompts((9,))[0])
            results(server, 1)
    assert made


def test_only_devices_that_can(served):
    _, fast = served
    assert not replay.can_record(torch.device("cpu"))
    with running(fast) as server:
        server.add_request(prompts((9,))[0])
        results(server, 1)
    assert decoding(fast).replayed is None
    assert copy.deepcopy(fast).mla_batching is not fast.mla_batching
