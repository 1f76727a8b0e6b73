"""Decode steps in a cache that grows: rows are appended in place, and nobody can tell from what a model returns."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers

import mla_compile
from mla_compile import backend, pipeline
from mla_compile.errors import OptionError
from mla_compile.passes.ir.graph import packet
from tests.support import models
from tests.support.tiers import also, full
from tests.support.toy import Toy, decode_inputs

aten = torch.ops.aten
PROMPT, STEPS = 6, 30


def decode(model: Any, given: Any, cache: Any, start: int = 0, stop: int = PROMPT + STEPS) -> torch.Tensor:
    """The logits of the last token of the prompt, if ``start`` is 0, and of each token up to ``stop``."""
    places = [slice(p, p + 1) for p in range(max(start, PROMPT), stop)]
    places = [slice(0, PROMPT), *places] if start == 0 else places
    with torch.no_grad():
        logits = [
            model(
                given["input_ids"][:, place],
                attention_mask=given["attention_mask"][:, : place.stop],
                past_key_values=cache,
            ).logits[:, -1]
            for place in places
        ]
    return torch.stack(logits)


def caches(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers if hasattr(layer, "keys") for t in (layer.keys, layer.values)]


@pytest.mark.parametrize(
    ("family", "layers", "batch", "codegen"),
    [
        *also("family", ("deepseek_v3", 2, 2, "eager"), ("minicpm3", 2, 3, "eager"), ("kimi_linear", 2, 2, "eager")),
        # In the last, the prompt is the original's.
        *also("inductor", ("deepseek_v3", 2, 1, "inductor"), ("minicpm3", 1, 3, "inductor, steps")),
    ],
)
def test_rows_stay_where_they_are_and_tokens_do_not_change(family: str, layers: int, batch: int, codegen: str):
    codegen, _, steps_alone = codegen.partition(", ")
    model = models.build(family, attn="sdpa", num_hidden_layers=layers)
    fast = mla_compile.optimize(model, codegen=codegen, strict=True)
    given = models.prompt(batch, PROMPT + STEPS, 2 if batch > 1 else 0)
    expected, mine = transformers.DynamicCache(config=model.config), transformers.DynamicCache(config=model.config)
    addresses, logits = [], [decode(model if steps_alone else fast, given, mine, 0, PROMPT)]
    for place in range(PROMPT, PROMPT + STEPS):
        logits.append(decode(fast, given, mine, place, place + 1))
        addresses.append([t.data_ptr() for t in caches(mine)])
    torch.testing.assert_close(torch.cat(logits), decode(model, given, expected), rtol=1e-4, atol=1e-4)
    moved = [sum(a != b for a, b in itertools.pairwise(one)) for one in zip(*addresses, strict=True)]
    assert addresses[0]
    assert max(moved) <= 3, "from 7 rows to 36 the memory doubles at 8, 16 and 32"
    for have, want in zip(caches(mine), caches(expected), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert any("appended in place to" in message for message in fast.mla_report.messages)


def run_toy(fast: Any) -> None:
    x, rows = decode_inputs()
    with torch.no_grad():
        for step in range(4):
            _, rows = fast(x + step, rows)


def run_model(fast: Any) -> None:
    decode(fast, models.prompt(2, PROMPT + 5, 0), transformers.DynamicCache(config=fast.config), 0, PROMPT + 5)


@pytest.mark.parametrize(
    ("make", "run", "tensors", "spared"),
    [
        (Toy, run_toy, 1, 0),
        # Behind a prompt of ours, the first step is compiled for any length (dynamo/test_sizes.py counts this, too).
        *also("family", (lambda: models.build("minicpm3", attn="sdpa"), run_model, 2 * 2, 1)),
    ],
    ids=["toy", "minicpm3"],
)
def test_the_graph_of_a_step_joins_nothing_of_the_cache(
    make: Any, run: Any, tensors: int, spared: int, monkeypatch: pytest.MonkeyPatch
):
    graphs = []
    real = pipeline.run

    def recorded(*args, **options):
        graphs.append(real(*args, **options))
        return graphs[-1]

    monkeypatch.setattr(pipeline, "run", recorded)
    model, compiled = make().eval(), []
    for appends in ("copy", "in_place"):
        run(mla_compile.optimize(model, codegen="eager", strict=True, appends=appends))
        compiled.append(len(graphs) - sum(compiled))
    assert compiled[1] == compiled[0] - spared, "in place, the first step is compiled for any length"
    step = graphs[-1].program
    inputs = {step.node(one.input) for one in step.appends}
    assert len(inputs) == tensors
    assert not [n for n in step.gm.graph.nodes if packet(n) is aten.cat and inputs.intersection(n.all_input_nodes)]


def test_rows_continued_more_than_once_and_in_another_order():
    model = Toy().eval()
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    results = []
    with torch.no_grad():
        for run in (model, fast):
            x, rows = decode_inputs(batch=3)
            for step in range(3):
                _, rows = run(x + step, rows)
            begun = rows.clone()
            # In turns, so that each writes while the others wait; the last as beams do it.
            held, said = [rows, rows, copy.deepcopy(rows), rows.index_select(0, torch.tensor([2, 0, 0]))], []
            for step in range(3):
                for branch, past in enumerate(held):
                    y, held[branch] = run(x + 10 * branch + step, past)
                    said.append(y)
            assert torch.equal(held[1][:, : begun.shape[1]], begun)
            results.append((said, held))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@full("family")
def test_one_prompt_continued_more_than_once():
    model = models.build("deepseek_v3", attn="sdpa")
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    given = models.prompt(2, PROMPT + STEPS, 0)
    other = {**given, "input_ids": given["input_ids"].flip(0)}
    other["input_ids"][:, :PROMPT] = given["input_ids"][:, :PROMPT]
    results = []
    for run in (model, fast):
        cache = transformers.DynamicCache(config=model.config)
        decode(run, given, cache, 0, PROMPT + 5)
        shared, copied = copy.copy(cache), copy.deepcopy(cache)
        shared.layers = [copy.copy(layer) for layer in cache.layers]
        kept = [t.clone() for t in caches(cache)]
        # In turns, so that each writes while the others wait.
        logits = []
        for place in range(PROMPT + 5, PROMPT + 15):
            logits += [
                decode(run, tokens, one, place, place + 1)
                for tokens, one in ((given, cache), (other, shared), (given, copied))
            ]
        results.append(torch.cat(logits))
        assert all(torch.equal(t[:, :, : k.shape[2]], k) for t, k in zip(caches(shared), kept, strict=True))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@full("family")
@pytest.mark.parametrize("how", [{"num_return_sequences": 2, "num_beams": 2}, {"num_beams": 3}, {}])
def test_generate_with_beams_reorders_the_rows(how: dict[str, int]):
    model = models.build("minicpm3", attn="sdpa", num_hidden_layers=1)
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    given = models.prompt(2, PROMPT, 2)
    told = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    assert torch.equal(fast.generate(**given, **told), model.generate(**given, **told))


class Shown(Toy):
    """Returns views of its cache beside it, and something that is computed from all of it."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        y, rows = super().forward(x, rows)
        return y, rows, rows[:, -1:], rows.mT, rows.flatten(1) * 2, rows.reshape(-1, rows.shape[-1]).sum(0)


@pytest.mark.parametrize(
    ("codegen", "batch"),
    [("eager", 3), *also("combination", ("eager", 1)), *also("inductor", ("inductor", 1), ("inductor", 3))],
)
def test_views_of_the_cache_that_are_returned_show_what_they_showed(codegen: str, batch: int):
    model = Shown().eval()
    fast = torch.compile(model, backend=backend.mla, options={"codegen": codegen, "strict": True})
    x, rows = decode_inputs(batch=batch)
    expected = mine = rows
    kept = []
    with torch.no_grad():
        for step in range(8):
            want, have = model(x + step, expected), fast(x + step, mine)
            expected, mine = want[1], have[1]
            kept.append((want, have))
    for want, have in kept:  # after all of them: no step wrote into what an earlier one returned
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@full("inductor")
def test_compiled_code_appends_in_place_and_returns_such_views():
    """To rows that a graph appended to before: only what all later steps run is compiled."""
    model, settings = Shown().eval(), {"forms": "absorbed", "dynamic": True, "strict": True}
    begun, fast = mla_compile.optimize(model, codegen="eager", **settings), mla_compile.optimize(model, **settings)
    x, rows = decode_inputs(cached=20, batch=3)
    wants, haves = [(None, rows)], [(None, rows)]
    with torch.no_grad():
        for step, call in enumerate((begun, fast, fast, fast)):
            wants.append(model(x + step, wants[-1][1]))
            haves.append(call(x + step, haves[-1][1]))
    torch.testing.assert_close(haves[1:], wants[1:], rtol=1e-4, atol=1e-5)
    assert len({have[1].data_ptr() for have in haves[1:]}) == 1
    assert fast.mla_report.absorbed == fast.forward.compiler.graphs == 1


def test_a_program_cannot_be_asked_to_append_in_place():
    with torch.no_grad():
        program = torch.export.export(Toy().eval(), decode_inputs())
        with pytest.raises(OptionError, match="appends is 'in_place'"):
            mla_compile.optimize(program, appends="in_place")


@full("combination")  # the graph of the step above is asked for with copies, too
def test_copies_are_there_for_who_asks():
    model = models.build("minicpm3", attn="sdpa", num_hidden_layers=1)
    fast = mla_compile.optimize(model, codegen="eager", strict=True, appends="copy")
    given, cache = models.prompt(2, PROMPT + 3, 0), transformers.DynamicCache(config=model.config)
    decode(fast, given, cache, stop=PROMPT + 3)
    assert all(t.is_contiguous() for t in caches(cache))
    assert fast.mla_report.messages == ()
