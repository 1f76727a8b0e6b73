"""DeepSeek-V4 as transformers has it: heads read one row per token, of a window and of rows that stand for several.

The tiny model has all three kinds of layers. Tokens and logits are the original's, past several compressed rows and
past the number of them that an indexer picks; every attention of a step is the operator.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile.errors import ExportError
from tests.support.compiling import CountedWithin
from tests.support.made import Made
from tests.support.tiers import also, full
from tests.zoo import rows_of_two_memories
from tests.zoo.base import Dims

pytest.importorskip("transformers.models.deepseek_v4")
from transformers import DynamicCache

from tests.support.compressed_rows import HEAVY, SLIDING, SPARSE, tiny

pytestmark = [
    pytest.mark.usefixtures("native_kernel"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]

DIMS = Dims()


def steps(model: torch.nn.Module, fast: torch.nn.Module, prompt: torch.Tensor, count: int, **given) -> float:
    """The largest difference of logits, with the original's tokens."""
    own, held = (DynamicCache(config=model.config) for _ in range(2))
    tokens, worst = prompt, 0.0
    mask = given.get("attention_mask")
    with torch.no_grad():
        for _ in range(count):
            more = {} if mask is None else {"attention_mask": mask}
            want = model(tokens, cache=own, use_cache=True, **more).logits
            got = fast(tokens, cache=held, use_cache=True, **more).logits
            worst = max(worst, float((got - want).abs().max()))
            tokens = want[:, -1:].argmax(-1)
            assert torch.equal(tokens, got[:, -1:].argmax(-1))
            mask = None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
    return worst


def graphs(fast: torch.nn.Module) -> int:
    return len({site.graph for site in fast.mla_report.sites})


def unfused(fast: torch.nn.Module) -> list:
    """Attentions of steps that are no operator; the first graph is the prompt's."""
    first = fast.mla_report.sites[0].graph
    return [s for s in fast.mla_report.sites if s.graph != first and not any("operator" in n for n in s.notes)]


@pytest.mark.parametrize(
    ("layers", "batch", "count"),
    [
        *also(
            "family",
            ((SLIDING,), 2, 12),
            ((SPARSE,), 1, 40),
            ((HEAVY,), 3, 40),
            ((SLIDING, SPARSE, HEAVY), 3, 120),
        )
    ],
)
def test_steps_of_every_kind_of_layer(layers: tuple[str, ...], batch: int, count: int) -> None:
    torch.compiler.reset()
    model = tiny(*layers)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    prompt = torch.randint(1, 67, (batch, 21), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo's limit among them
        assert steps(model, fast, prompt, count) < 1e-6  # norms of the model are in float32
    assert {s.code.value for s in fast.mla_report.sites} == {"shared_rows"}
    assert unfused(fast) == []
    assert graphs(fast) <= 13
    if SPARSE in layers:
        assert any("a list of keys" in note for s in fast.mla_report.sites for note in s.notes)


@pytest.mark.full("family")  # by default, dynamo/test_settling.py counts the graphs of what fills and drains
def test_a_second_cache_compiles_nothing() -> None:
    """Windows and compressed rows as DeepSeek-V4 has them, without the rest of the model."""
    torch.compiler.reset()
    module = rows_of_two_memories.build(DIMS).eval()
    fast = mla_compile.optimize(module, codegen="eager", verify=False)
    found = []
    for seed in range(2):
        own, other = (rows_of_two_memories.session(m) for m in (module, fast))
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for S in (7, *[1] * 4):
                x = torch.randn(DIMS.B, S, DIMS.D, generator=random, dtype=DIMS.dtype)
                torch.testing.assert_close(other(x), own(x))
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


@pytest.mark.full("family")
def test_a_second_generation_compiles_nothing() -> None:
    torch.compiler.reset()
    model = tiny(SPARSE, HEAVY)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for seed in range(2):
        prompt = torch.randint(3, 67, (2, 21), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(fast.generate(prompt, **options), model.generate(prompt, **options))
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


@full("draws")
@pytest.mark.parametrize(
    ("layers", "batch", "prompt", "last", "most", "count", "window"),
    [
        ((SPARSE,), 1, 19, 18, 3, 60, 16),
        ((SLIDING, SPARSE, HEAVY), 1, 131, 130, 4, 270, 128),
        ((SLIDING, SPARSE, HEAVY), 4, 131, 130, 4, 400, 128),
        # The prompt, steps that make a row for 128 tokens, and all others.
        ((HEAVY,), 4, 131, 130, 3, 400, 128),
        # The window is full from the 129th token on, which the model asks of an int, and rows for 128 tokens come at
        # each 128th. So a full window and such a row first meet at the 256th.
        ((SLIDING, SPARSE, HEAVY), 1, 5, 256, 7, 1130, 128),
        ((SLIDING, SPARSE, HEAVY), 4, 5, 256, 7, 400, 128),
    ],
)
def test_many_tokens_settle(
    layers: tuple[str, ...], batch: int, prompt: int, last: int, most: int, count: int, window: int
) -> None:
    torch.compiler.reset()
    counters.clear()
    sizes = {"sliding_window": window, "index_topk": window // 8, "max_position_embeddings": 2048}
    model = tiny(*layers, compress_rates={SPARSE: 4, HEAVY: window}, **sizes)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    cache, tokens = DynamicCache(config=model.config), torch.randint(1, 67, (batch, prompt))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # Dynamo's limit among them
        for step in range(count):
            tokens = fast(tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            if step == last:
                settled = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == settled <= most
    assert unfused(fast) == []


@pytest.mark.full("draws")
def test_the_first_step_is_compiled_for_any_length() -> None:
    """Nothing was read at the prompt, and then one row waits and one stands for four tokens, which is chance."""
    torch.compiler.reset()
    counters.clear()
    model = tiny(SPARSE, HEAVY, sliding_window=128, compress_rates={SPARSE: 4, HEAVY: 128})
    fast = mla_compile.optimize(model, codegen="eager", verify=False)
    prompt = torch.randint(1, 67, (1, 5), generator=torch.Generator().manual_seed(1))
    assert steps(model, fast, prompt, 7) < 1e-6  # of which one makes the second row
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.full("family")
def test_plain_torch_compile_makes_more_graphs_of_as_many_tokens() -> None:
    """A count beside ours: 40 tokens, with Dynamo's limit out of the way."""
    found = {}
    for name in ("plain", "ours"):
        torch.compiler.reset()
        counters.clear()
        model = tiny(SLIDING, SPARSE, HEAVY)
        fast = mla_compile.optimize(model, codegen="eager") if name == "ours" else torch.compile(model, backend="eager")
        cache, tokens = DynamicCache(config=model.config), torch.randint(1, 67, (2, 5))
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
            for _ in range(40):
                tokens = fast(tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        found[name] = counters["stats"]["unique_graphs"]
    assert 2 * found["ours"] < found["plain"]


@pytest.mark.full("family")
def test_steps_settle_with_torch_compile_too() -> None:
    torch.compiler.reset()
    model = tiny(SPARSE, HEAVY)
    fast = torch.compile(model, backend="mla", options={"codegen": "eager", "strict": True})
    prompt = torch.randint(1, 67, (2, 21), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        assert steps(model, fast, prompt, 24) < 1e-6


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Saved(NamedTuple):
    """What is saved and loaded: generations of (sequences, tokens of the prompt, new tokens)."""

    layers: tuple[str, ...]
    codegen: str
    saved: tuple[tuple[int, int, int], ...]
    loaded: tuple[tuple[int, int, int], ...]


SAVED = {
    "eager": Saved((SLIDING, HEAVY), "eager", ((1, 21, 40), (1, 12, 30)), ((1, 17, 60), (1, 30, 40))),
    "inductor": Saved((SPARSE,), "inductor", ((1, 21, 40), (1, 12, 30)), ((1, 17, 60), (1, 30, 40))),
    # One sequence and several, each for prompts of two lengths: after the second all are symbolic.
    "batches": Saved(
        (SPARSE,),
        "eager",
        ((1, 21, 20), (3, 21, 20), (1, 17, 20), (3, 17, 20)),
        ((1, 17, 60), (3, 17, 60), (4, 30, 40)),
    ),
}


def generations(model: torch.nn.Module, sizes: tuple[tuple[int, int, int], ...]) -> list[torch.Tensor]:
    """The tokens of generations."""
    prompts = ((torch.arange(batch * prompt).view(batch, prompt) * 7 % 61 + 3, new) for batch, prompt, new in sizes)
    return [model.generate(ids, max_new_tokens=new, **GREEDY) for ids, new in prompts]


def save_code(path: str, name: str) -> None:
    case = SAVED[name]
    fast = mla_compile.optimize(tiny(*case.layers, dtype=torch.float32), codegen=case.codegen)
    mla_compile.save(fast, path, lambda model: generations(model, case.saved))


def load_code(path: str, name: str) -> None:
    case = SAVED[name]
    model = tiny(*case.layers, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    fast = mla_compile.load(path, model)
    assert all(map(torch.equal, generations(fast, case.loaded), generations(model, case.loaded)))
    assert not counters["frames"]


@pytest.mark.full("inductor")
@pytest.mark.parametrize("name", SAVED)
def test_saved_code_runs_in_another_process_with_other_weights(tmp_path: Path, name: str) -> None:
    """Each kind of layer; with Inductor, which takes long, the one that has a cache of each kind."""
    for do in ("save_code", "load_code"):
        call = f"{do}({str(tmp_path / 'code')!r}, {name!r})"
        code = f"from tests.doors import test_shared_row_families as here; here.{call}"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.full("family")
def test_a_cache_that_drains_is_not_saved_by_a_few_tokens(tmp_path: Path) -> None:
    fast = mla_compile.optimize(tiny(SPARSE), codegen="eager", verify=False)
    with pytest.raises(ExportError, match=r"a cache that fills and drains.*give run="):
        mla_compile.save(fast, tmp_path / "code")


@pytest.mark.full("family")
def test_prompts_in_chunks_of_which_windows_and_lists_show_few_keys() -> None:
    torch.compiler.reset()
    model = tiny(SPARSE, HEAVY)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    own, held = (DynamicCache(config=model.config) for _ in range(2))
    random = torch.Generator().manual_seed(4)
    for count in (50, 23, 1, 2):
        tokens = torch.randint(1, 67, (2, count), generator=random)
        with torch.no_grad():
            want, got = (f(tokens, cache=c, use_cache=True).logits for f, c in ((model, own), (fast, held)))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    first = [s for s in fast.mla_report.sites if s.graph == fast.mla_report.sites[0].graph]
    assert all(any("window of 8" in note for note in site.notes) for site in first)
    assert sum(any("a list of keys" in note for note in site.notes) for site in first) == 1


@pytest.mark.full("family")
def test_a_compressed_row_more_costs_what_the_indexer_costs() -> None:
    """The original's heads score and weigh every row; the operator reads those that the indexer picks."""
    torch.compiler.reset()
    model, batch = tiny(SPARSE), 2
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    counted = {}
    for name, call in (("own", model), ("ours", fast)):
        cache, tokens = DynamicCache(config=model.config), torch.randint(1, 67, (batch, 40))
        with torch.no_grad():
            for at in range(40, 62):
                with CountedWithin(counter := FlopCounterMode(display=False)) if at > 56 else nullcontext():
                    tokens = call(tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
                counted[name, at] = counter.get_total_flops() if at > 56 else 0
    config = model.config
    indexer = 2 * config.index_n_heads * (config.index_head_dim + 1)  # and the weights of its heads
    attention = 2 * config.num_attention_heads * 2 * config.head_dim
    for at in range(57, 61):  # one of these steps emits a row and is the first to read it
        row = counted["ours", at + 1] - counted["ours", at]
        assert row == (batch * indexer if (at + 1) % 4 == 0 else 0)
    own = counted["own", 61] - counted["own", 57]
    assert own > batch * attention


@pytest.mark.full("family")
@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_a_prompt_makes_neither_copies_of_rows_nor_their_scores(kind: str) -> None:
    """What grows with the square of a prompt is one number of the indexer, or of a mask, for a query and a row.

    The number of queries, heads and rows are told apart by their sizes, also where a row or a column more is joined.
    """
    torch.compiler.reset()
    S, H, C = 509, 6, {SPARSE: 127, HEAVY: 31}[kind]
    rates = {SPARSE: 4, HEAVY: 16}
    model = tiny(kind, num_attention_heads=H, compress_rates=rates, max_position_embeddings=1024, dtype=torch.float32)
    fast = mla_compile.optimize(model, codegen="eager", verify=False, strict=True)
    prompt = torch.randint(1, 67, (1, S), generator=torch.Generator().manual_seed(1))
    queries, heads = frozenset((S,)), frozenset((H,))
    window, compressed, joined = (frozenset((n, n + 1)) for n in (S, C, S + C))
    with torch.no_grad():
        fast(prompt, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
        for call, of_ours in ((model, False), (fast, True)):
            with Made() as made:
                call(prompt, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
            assert (not made.with_axes(joined)) == of_ours, "rows or masks of both memories"
            assert (not made.with_axes(queries, window)) == of_ours, "a mask of the window"
            assert (not made.with_axes(heads, queries, compressed | joined)) == of_ours, "scores of each head"
            if of_ours:
                assert not made.with_axes(heads, compressed), "rows of each head"
                found = made.with_axes(queries, compressed - {32})  # 32 is also the width of queries of the indexer
                ours = {"aten.ge.Tensor", "aten.masked_fill.Scalar"}  # rows that are not there yet
                ours |= {"mla_compile.index_scores.default"} if kind == SPARSE else {"aten.full.default"}
                assert {name for name, _ in found} == ours
                assert len(found) == 3


@pytest.mark.full("family")
def test_rows_of_the_window_may_be_cropped_until_it_is_full() -> None:
    """Compressed rows stay as they are, in the original too."""
    torch.compiler.reset()
    model = tiny(SLIDING, SPARSE, HEAVY)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    own, held = (DynamicCache(config=model.config) for _ in range(2))
    tokens = torch.randint(1, 67, (2, 6), generator=torch.Generator().manual_seed(1))
    for step in range(14):
        with torch.no_grad():
            want, got = (f(tokens, cache=c, use_cache=True).logits for f, c in ((model, own), (fast, held)))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        tokens = want[:, -1:].argmax(-1)
        if step == 0:
            own.crop(-2)
            held.crop(-2)
    for cache in (own, held):
        with pytest.raises(RuntimeError, match="sliding window size was already reached"):
            cache.crop(-2)


@pytest.mark.full("family")
def test_left_padding() -> None:
    torch.compiler.reset()
    model = tiny(SLIDING, SPARSE)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    prompt = torch.randint(1, 67, (2, 13), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    assert steps(model, fast, prompt, 12, attention_mask=mask) < 1e-6


@pytest.mark.full("family")
def test_beams_and_a_short_prompt() -> None:
    """No compressed row is there at first, and beams reorder all that is kept."""
    torch.compiler.reset()
    model = tiny(SPARSE, HEAVY)
    fast = mla_compile.optimize(model, codegen="eager")
    prompt = torch.randint(3, 67, (1, 2), generator=torch.Generator().manual_seed(3))
    options = {"num_beams": 3, "max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(fast.generate(prompt, **options), model.generate(prompt, **options))


def test_caches_that_drain_are_refused_by_the_onnx_export(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ExportError, match=r"buffer_kv .* has 3 rows after 7 tokens.*export the ExportedProgram"):
        mla_compile.export_onnx(tiny(SPARSE, dtype=torch.float32), tmp_path / "model")
