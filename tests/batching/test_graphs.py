"""How many graphs there are, what a pool takes, rows in float8, and models that this is not for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.generation.continuous_batching.distributed import DistributedHelper

import mla_compile
from mla_compile.batching import door
from mla_compile.batching.graphs import StepGraphs, bucket
from mla_compile.batching.pages import LatentPages
from mla_compile.capture.causal_lm import wire
from mla_compile.errors import CaptureError, InputError, MlaCompileWarning, OptionError
from mla_compile.options import Options
from tests.batching.conftest import serving
from tests.support import families, models
from tests.support.serving import alone, free_blocks, greedy, pages, prompts, results, running, tokens
from tests.support.tiers import also, full


def test_buckets_are_powers_of_two_from_two_on():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 1000)] == [2, 2, 4, 4, 8, 8, 16, 1024]


@full("draws")
def test_no_graph_is_compiled_for_a_number_of_users(monkeypatch):
    """Three graphs, each compiled once, for any number of requests, pages and tokens."""
    _, fast = serving("deepseek_v3", verify=False)
    made = []
    inner = StepGraphs._generate
    monkeypatch.setattr(StepGraphs, "_generate", lambda self, *args: made.append(args) or inner(self, *args))
    with running(fast, new=5, page=4, blocks=256) as manager:
        for count in (1, 2, 7, 13):
            for ids in prompts(range(3, 3 + count)):
                manager.add_request(ids)
            results(manager, count)
        for ids in (prompts((40,))[0], [*prompts((40,))[0], 9, 9]):  # the second shares its beginning: few new tokens
            manager.add_request(ids)
            results(manager, 1)
    graphs = fast.mla_batching.graphs
    assert [graph.name for graph in graphs] == ["prompt, expanded", "prompt, absorbed", "decode"]
    assert len(made) == 3
    assert all(graph.buckets for graph in graphs)
    assert {size for B, M in graphs[2].buckets for size in (B, M)} <= {2, 4, 8, 16}
    assert "one token of each of B requests over block tables of M pages" in str(graphs[2])


@full("inductor")
def test_compiled_by_inductor():
    model = models.build("deepseek_v3", num_hidden_layers=1)
    fast = mla_compile.continuous_batching(model)
    ids = prompts()
    assert tokens(fast, ids, max_batch_tokens=16) == [alone(model, one) for one in ids]
    assert tokens(fast, ids[:1]) == [alone(model, ids[0])]
    first, later, step = (graph.compilations for graph in fast.mla_batching.graphs)
    assert (first, step) == (2, 1)  # with and without rows before
    assert later in (1, 2)  # a piece of a single token has a graph of its own, where the requests' arrival makes one


@full("inductor")
def test_code_for_one_size_is_not_run_for_another():
    """Inductor compiles complex rotations for the number of tokens it sees: few compilations, then the graph itself."""
    model = models.build("deepseek_v2", num_hidden_layers=1)
    fast = mla_compile.continuous_batching(model, verify=False)
    ids = prompts()
    assert tokens(fast, ids, max_batch_tokens=64) == [alone(model, one) for one in ids]
    for graph in fast.mla_batching.graphs:
        assert 1 <= graph.compilations <= graph.limit
        assert f"compilations: {graph.compilations} of {graph.limit}" in str(graph)


class TestMemory:
    @full("family")
    def test_a_token_of_deepseek_v3_takes_1152_bytes_in_a_layer(self):
        model = models.build(
            "deepseek_v3",
            dtype=torch.bfloat16,
            num_hidden_layers=1,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
        )
        assert StepGraphs(wire(model), Options(verify=False)).bytes_of_row() == 1152
        packed = StepGraphs(wire(model), Options(verify=False, cache_dtype="fp8"))
        assert packed.bytes_of_row() == 512 + 16 + 128

    def test_a_pool_takes_what_it_says(self, served):
        _, fast = served
        graphs = fast.mla_batching.steps
        assert fast.mla_batching.bytes_of_token == (64 + 16) * 4
        assert "the cache holds 80 -> 80 values per token" in fast.mla_report.summary()
        cache = _cache(graphs, fast, pages(16, 10))
        assert sum(pool.numel() * pool.element_size() for pool in cache.pools) == (10 + 2) * 16 * 320
        assert (cache.num_blocks, cache.room()) == (10, 160)
        # Rows of the layer, and its K and V: H=4 N+R=48 V=24.
        assert graphs.bytes_to_read_token() == 320 + 4 * (48 + 24) * 4

    def test_blocks_fill_the_budget(self, served, monkeypatch):
        """Twice the memory that is allowed, twice the blocks; half of them for each of two ranks of one machine."""
        _, fast = served
        graphs = fast.mla_batching.steps
        counts = []
        for share in (0.0005, 0.001):
            config = pages(blocks=None, max_memory_percent=share, max_batch_tokens=16, max_requests_per_batch=4)
            counts.append(_cache(graphs, fast, config).num_blocks)
        assert counts[0] > 100
        assert counts[1] == pytest.approx(2 * counts[0], rel=0.1)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert _cache(graphs, fast, config).num_blocks == pytest.approx(counts[0], rel=0.1)

    def test_no_room_is_an_error_that_says_what_to_set(self, served):
        _, fast = served
        config = pages(blocks=None, max_memory_percent=1e-9, max_batch_tokens=16)
        with pytest.raises(InputError, match=r"no room for a block of 16 tokens \(5120 bytes\).*set num_blocks"):
            _cache(fast.mla_batching.steps, fast, config)

    def test_blocks_go_to_the_host_and_back(self, served):
        """What the offloading of transformers does with its one tensor; it needs pinned memory, which needs a GPU."""
        _, fast = served
        cache = _cache(fast.mla_batching.steps, fast, pages(16, 6))
        for pool in cache.pools:
            pool.copy_(torch.randn(pool.shape))
        before = [pool.clone() for pool in cache.pools]
        view, at = cache.blocks._copy_view, torch.tensor([3, 5])
        kept = view.index_select(0, at)
        assert kept.shape == (2, cache.blocks.bytes_per_block)
        assert kept.dtype == torch.uint8
        view.index_copy_(0, torch.tensor([6, 2]), kept)
        for pool, old in zip(cache.pools, before, strict=True):
            assert torch.equal(pool[[6, 2]], old[[3, 5]])
            assert torch.equal(pool[[0, 1, 3, 4, 5, 7]], old[[0, 1, 3, 4, 5, 7]])

    @pytest.mark.parametrize("page", [6, 512])
    def test_pages_that_the_operator_does_not_take(self, served, page):
        _, fast = served
        with pytest.raises(InputError, match=f"page_size is {page}, expected a power of two up to 256"):
            fast.init_continuous_batching(continuous_batching_config=pages(page))


class TestFloat8:
    """Their tokens: test_replay.py."""

    @full("combination")
    def test_logits_are_off_by_what_rows_are_off(self):
        model = models.build("deepseek_v3", tie_word_embeddings=False, num_hidden_layers=1)
        fast = mla_compile.continuous_batching(model, codegen="eager", cache_dtype="fp8")
        assert fast.mla_batching.bytes_of_token == 64 + 4 * 4 + 16 * 4
        (told,) = [m for m in fast.mla_batching.report.messages if "float8" in m]
        assert told == "pages hold latent rows in float8 with a scale each: a relative error of 2.5%, measured"
        ids = prompts((40, 7, 33))
        with running(fast, new=8, return_logprobs=True, page=8) as manager:
            names = [manager.add_request(one) for one in ids]
            found = results(manager, 3)
            assert {pool.dtype for pool in manager.batch_processor.cache.pools} == {torch.uint8, torch.float32}
            assert free_blocks(manager) == 64
        for name, one in zip(names, ids, strict=True):
            own = found[name].generated_tokens
            with torch.no_grad():
                logits = model(torch.tensor([one + own])).logits[0, len(one) - 1 : -1]
            exact = logits.log_softmax(-1).gather(1, torch.tensor(own)[:, None])[:, 0]
            off = (torch.tensor(found[name].logprobs) - exact).abs()
            assert off[0] < 1e-4  # a whole prompt is read before its rows are rounded
            assert 0 < off[1:].max() < 0.5

    @full("family")
    def test_half_precision(self):
        model = models.build("minicpm3", dtype=torch.bfloat16, tie_word_embeddings=False, num_hidden_layers=1)
        fast = mla_compile.continuous_batching(model, codegen="eager", cache_dtype="fp8")
        assert fast.mla_batching.bytes_of_token == 64 + 4 * 4 + 16 * 2
        assert len(tokens(fast, prompts((20, 3)), new=4)[0]) == 4


class TestOtherModels:
    @pytest.mark.parametrize("name", ["llama", *also("family", "gemma2")])
    def test_without_a_latent_they_are_returned_as_they_are(self, name):
        family = families.FAMILIES[name]
        import transformers

        model = AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**family.sizes)).eval()
        with pytest.warns(
            MlaCompileWarning, match="ForCausalLM has no latent attention to absorb: it runs as in transformers$"
        ):
            same = mla_compile.continuous_batching(model, codegen="eager")
        assert same is model
        assert "init_continuous_batching" not in vars(model)
        ids = prompts((9,))
        out = same.generate_batch(
            [[n % 90 for n in ids[0]]],
            generation_config=greedy(3),
            continuous_batching_config=pages(use_async_batching=False),
        )
        assert [len(one.generated_tokens) for one in out.values()] == [3]

    @full("family")  # the reasons that there are: tests/passes/cache/test_pages.py
    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("kimi_linear", "cannot be decoded over pages: the cache caches_0 does not grow by new rows"),
        ],
    )
    def test_a_latent_that_is_not_on_pages_is_refused_with_the_reason(self, name, told):
        with pytest.raises(CaptureError, match=told):
            mla_compile.continuous_batching(models.build(name), codegen="eager", verify=False)

    def test_what_is_no_language_model(self):
        with pytest.raises(InputError, match="takes a causal language model of transformers, got Linear"):
            mla_compile.continuous_batching(torch.nn.Linear(2, 2))

    def test_an_option_that_does_not_exist(self):
        with pytest.raises(OptionError, match="there is no option 'codegn'"):
            mla_compile.continuous_batching(models.build("minicpm3", num_hidden_layers=1), codegn="eager")

    def test_wrong_numbers_are_noticed_before_anybody_is_served(self, served, monkeypatch):
        """With the graphs that are there: none is traced again."""
        from mla_compile.batching import check as module
        from mla_compile.batching import door

        model, fast = served
        monkeypatch.setattr(door, "StepGraphs", lambda *_, **__: fast.mla_batching.steps)

        inner = module._error
        monkeypatch.setattr(module, "_error", lambda lm, ids, n, got: inner(lm, ids, n, [1.01 * x for x in got]))
        with pytest.raises(CaptureError, match=r"over pages differs from the model by 1.0e-02 \(relative\)"):
            mla_compile.continuous_batching(model, codegen="eager")


def _cache(graphs: StepGraphs, fast, config: ContinuousBatchingConfig) -> LatentPages:
    config.max_memory_percent = config.max_memory_percent or 0.6
    return LatentPages(graphs, fast.config, config, torch.device("cpu"), torch.float32, DistributedHelper(None, None))


def test_what_is_warmed_up_is_not_compiled_again(served, monkeypatch):
    """All sizes up to those of the pool are tried, and a second pool of the same sizes takes the code of the first."""
    model, fast = served
    made = []
    inner = StepGraphs._generate
    monkeypatch.setattr(StepGraphs, "_generate", lambda self, *args: made.append(args) or inner(self, *args))
    monkeypatch.setattr(door, "optimize", lambda *_, **__: fast)
    monkeypatch.setattr(door, "_graphs", lambda *_: fast.mla_batching.steps)
    config = pages(blocks=16, max_requests_per_batch=8, max_batch_tokens=32)
    mla_compile.continuous_batching(model, codegen="eager", fold="always", verify=False, warm_up=config)
    decode, *reading = sorted(fast.mla_batching.graphs, key=lambda graph: graph.name)
    assert decode.buckets == {(2, 2), (4, 2), (8, 2), (2, 4), (2, 8), (2, 16)}
    assert all(graph.buckets >= {(S, P) for S in (2, 4, 8, 16, 32) for P in (0, 2)} for graph in reading)
    before = list(made)
    assert before
    ids = prompts((9, 30, 5))
    assert tokens(fast, ids, blocks=16, max_batch_tokens=32) == [alone(model, one) for one in ids]
    assert made == before
