"""Tokens of every request are those of ``generate()`` of that request alone, whatever the scheduler does with it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

import mla_compile
from mla_compile.kernels.cpu import native
from tests.batching.conftest import serving
from tests.support import models
from tests.support.serving import alone, greedy, pages, prompts, results, running, tokens
from tests.support.tiers import full

CONFIGS = {
    "whole prompts": {},
    "prompts in pieces": {"max_batch_tokens": 8},
    "small pages": {"page": 4, "blocks": 200},
    "no sharing": {"allow_block_sharing": False},
    "prompts first": {"scheduler_type": "prefill_first", "max_batch_tokens": 16},
    "few at a time": {"max_requests_per_batch": 3},
    "a pool that is too small for all": {"page": 8, "blocks": 12, "max_batch_tokens": 16},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_many_users_at_once(served, expected, config):
    _, fast = served
    assert tokens(fast, prompts(), **config) == expected


@full("family")
def test_layers_that_share_an_indexer():
    """Other families: test_replay.py."""
    model, fast = serving("glm_moe_dsa")
    ids = prompts((21, 5, 1, 40))
    assert tokens(fast, ids, max_batch_tokens=16) == [alone(model, one) for one in ids]


@full("family")
def test_eager_attention():
    """The model's own attention function does not matter: it is traced and rewritten."""
    model = models.build("minicpm3", attn="eager", tie_word_embeddings=False)
    fast = mla_compile.continuous_batching(model, codegen="eager")
    ids = prompts((9, 30))
    assert tokens(fast, ids) == [alone(model, one) for one in ids]
    assert model.config._attn_implementation == "eager"


@full("family")
def test_half_precision_is_as_near_to_the_model_as_the_model_is_to_itself():
    """Greedy tokens of bfloat16 differ between two right ways to compute them; they agree where the model is sure."""
    model = models.build("minicpm3", dtype=torch.bfloat16, tie_word_embeddings=False)
    fast = mla_compile.continuous_batching(model, codegen="eager")
    ids = prompts((9, 30, 17))
    got = tokens(fast, ids, new=6)
    for one, own in zip(ids, got, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([one + own])).logits[0, len(one) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(own)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.05


class _Operators(TorchDispatchMode):
    def __init__(self, pools):
        super().__init__()
        self.called, self.addresses, self.read = [], {pool.data_ptr() for pool in pools}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        if any(type(x) is torch.Tensor and x.data_ptr() in self.addresses for x in args):
            self.read.append(func)
        return func(*args, **(kwargs or {}))


def test_decoding_reads_the_pages_where_they_lie(served):
    """One paged attention in a layer, and besides only the writes of new rows touch the pools."""
    _, fast = served
    graphs = fast.mla_batching.steps
    pools = graphs.make_pools(6, 16, torch.device("cpu"))
    decode = graphs.decode(pools)
    table = torch.tensor([[2, 0], [3, 4]], dtype=torch.int32)
    lengths = torch.tensor([1, 20], dtype=torch.int32)
    ids = torch.tensor([[5], [6]])
    native.load()  # which is built with tensors of its own
    with _Operators(pools) as seen:
        decode.call(ids, (lengths[:, None] - 1).long(), table, lengths, pools)
    paged, dense = torch.ops.mla_compile.paged_decode_attention.default, torch.ops.mla_compile.decode_attention.default
    assert seen.called.count(paged) == 1
    assert dense not in seen.called
    assert set(seen.read) == {paged, torch.ops.aten.index_put_.default}
    assert [(pool[2, 0] != 0).any() and not pool[2, 1:].any() for pool in pools] == [True] * 2
    assert [bool(pool[4, 3].any()) and not pool[4, 4:].any() for pool in pools] == [True] * 2


class TestEnds:
    def test_an_eos_token(self, served):
        model, fast = served
        ids = prompts((20, 6, 30))
        free = [alone(model, one) for one in ids]
        ends = free[0][3]
        want = [alone(model, one, eos_token_id=ends, pad_token_id=0) for one in ids]
        out = fast.generate_batch(ids, generation_config=greedy(eos=ends), continuous_batching_config=pages())
        assert [one.generated_tokens for one in out.values()] == want
        assert len(want[0]) <= 4

    def test_none_means_none(self, served):
        """A generation config without an end of sequence is left as it is, and nothing ends early."""
        model, fast = served
        config = GenerationConfig(max_new_tokens=5, do_sample=False)
        assert config.eos_token_id is None
        ids = prompts((8,))
        out = fast.generate_batch(ids, generation_config=config, continuous_batching_config=pages())
        assert [one.generated_tokens for one in out.values()] == [alone(model, ids[0], 5)]
        assert config.eos_token_id is None

    def test_a_number_of_tokens_for_each_request(self, served):
        model, fast = served
        ids = prompts((20, 6, 30))
        with running(fast) as manager:
            names = [manager.add_request(one, max_new_tokens=n) for one, n in zip(ids, (1, 9, 4), strict=True)]
            found = results(manager, 3)
        want = [alone(model, one, n) for one, n in zip(ids, (1, 9, 4), strict=True)]
        assert [found[name].generated_tokens for name in names] == want


def test_a_shared_prefix_is_read_once(served):
    model, fast = served
    start = prompts((48,), seed=3)[0]
    ids = [start + tail for tail in prompts((5, 9), seed=4)]
    with running(fast) as manager:
        seen = []
        inner = manager._steps._graphs.prompt
        manager._steps._graphs.prompt = lambda ids, at, past: (
            seen.append((ids.shape[1], len(past[0]))) or inner(ids, at, past)
        )
        try:
            first = manager.add_request(ids[0])
            found = results(manager, 1)
            second = manager.add_request(ids[1])
            found |= results(manager, 1)
        finally:
            del manager._steps._graphs.prompt
    assert [found[name].generated_tokens for name in (first, second)] == [alone(model, one) for one in ids]
    assert seen == [(53, 0), (9, 48)]


def test_several_answers_to_one_prompt(served):
    """A request forks after its prompt: whole blocks are shared, the last one is copied in every pool."""
    model, fast = served
    ids = prompts((37, 1, 16))
    config = greedy()
    config.num_return_sequences = 3  # greedy search of transformers would refuse it when the config is made
    out = fast.generate_batch(ids, generation_config=config, continuous_batching_config=pages())
    assert len(out) == 9
    for name, one in out.items():
        assert one.generated_tokens == alone(model, ids[int(name.split("_")[1])]), name


def test_requests_that_come_while_others_run(served):
    model, fast = served
    ids = prompts()
    with running(fast, max_batch_tokens=16) as manager:
        names, found = [], {}
        for one in ids:
            names.append(manager.add_request(one))
            early = manager.get_result(timeout=0.01)
            if early is not None:
                found[early.request_id] = early
        found |= results(manager, len(ids) - len(found))
    assert [found[name].generated_tokens for name in names] == [alone(model, one) for one in ids]


def test_streaming_and_log_probabilities(served):
    model, fast = served
    ids = prompts((11,))[0]
    with running(fast, new=4, return_logprobs=True) as manager:
        manager.add_request(ids, streaming=True)
        parts = []
        while not parts or not parts[-1].is_finished():
            parts.append(manager.get_result(timeout=60))
    want = alone(model, ids, 4)
    assert [part.generated_tokens for part in parts] == [want[: n + 1] for n in range(4)]
    with torch.no_grad():
        logits = model(torch.tensor([ids + want])).logits[0, len(ids) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(want)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(parts[-1].logprobs), expected, rtol=1e-4, atol=1e-5)


@full("combination")
@pytest.mark.parametrize("dequantize", ["once", "step"])
def test_quantized_up_projections(dequantize):
    """Weights that are kept dequantized are inputs of the graphs, beside the pools."""
    quantization = pytest.importorskip("torchao.quantization")
    model = models.build("deepseek_v3", num_hidden_layers=1)
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config, filter_fn=lambda module, name: name.endswith("kv_b_proj"))
    fast = mla_compile.continuous_batching(model, codegen="eager", dequantize=dequantize)
    ids = prompts((20, 5))
    assert tokens(fast, ids) == [alone(model, one) for one in ids]


@full("combination")  # with a recording: test_replay.py
def test_folded_weights():
    model = models.build("deepseek_v3", num_hidden_layers=1)
    fast = mla_compile.continuous_batching(model, codegen="eager", fold="always")
    ids = prompts((20, 5))
    assert tokens(fast, ids) == [alone(model, one) for one in ids]
    model.model.layers[0].self_attn.kv_b_proj.weight.mul_(1.5)  # folded again
    assert tokens(fast, ids) == [alone(model, one) for one in ids]


@full("combination")
def test_weights_changed_in_place_are_followed():
    model = models.build("deepseek_v3", num_hidden_layers=1)
    fast = mla_compile.continuous_batching(model, codegen="eager")
    ids = prompts((12,))
    before = tokens(fast, ids)
    _take_weights(model, models.build("deepseek_v3", num_hidden_layers=1, seed=5))
    after = tokens(fast, ids)
    assert after == [alone(model, ids[0])]
    assert after != before


@full("combination")
def test_generate_still_works_beside_it(served):
    model, fast = served
    ids = prompts((9,))[0]
    assert alone(fast, ids, 5) == alone(model, ids, 5)


@full("combination")
def test_a_deep_copy_has_graphs_of_its_own():
    model = models.build("deepseek_v3", num_hidden_layers=1)
    fast = mla_compile.continuous_batching(model, codegen="eager")
    copied = copy.deepcopy(fast)
    other = models.build("deepseek_v3", num_hidden_layers=1, seed=5)
    _take_weights(copied, other)
    ids = prompts((12,))
    assert tokens(fast, ids) == [alone(model, ids[0])]
    assert tokens(copied, ids) == [alone(other, ids[0])] != tokens(fast, ids)


def _take_weights(model, other):
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.copy_(new)
