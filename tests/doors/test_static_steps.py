"""A decode step in a ``StaticCache``: one graph for every token, which a CUDA graph could capture."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import fx

import mla_compile
from mla_compile import pipeline
from mla_compile.passes.ir.graph import packet
from tests.support import models
from tests.support.programs import OP
from tests.support.recording import WAITS
from tests.support.tiers import also

ROOM, PROMPT, STEPS = 40, 6, 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The rewritten graphs, in the order in which they were compiled."""
    made: list[fx.Graph] = []
    real = pipeline.run

    def recorded(*args, **options):
        outcome = real(*args, **options)
        made.append(outcome.program.gm.graph)
        return outcome

    monkeypatch.setattr(pipeline, "run", recorded)
    return made


@pytest.mark.parametrize("family", ["minicpm3", *also("family", "deepseek_v3")])
@pytest.mark.parametrize("padded", [True, *also("combination", False)])
def test_one_graph_with_lengths_for_every_step(family: str, padded: bool, graphs: list[fx.Graph]):
    model = models.build(family, attn="sdpa")
    fast = mla_compile.optimize(model, codegen="eager")
    given = models.prompt(2, PROMPT + STEPS, 2 if padded else 0)
    results = []
    with torch.no_grad():
        for call in (model, fast):
            cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
            places = [slice(0, PROMPT), *(slice(p, p + 1) for p in range(PROMPT, PROMPT + STEPS))]
            logits, compiled, addresses = [], [], []
            for place in places:
                # Of full length, so that its size stays. What it says of tokens to come is hidden by the length.
                padding = torch.ones(2, ROOM, dtype=torch.long)
                padding[:, : PROMPT + STEPS] = given["attention_mask"]
                mask = {"attention_mask": padding} if padded else {}
                one = call if place.start else model  # the prompt is the original's
                logits.append(one(given["input_ids"][:, place], past_key_values=cache, **mask).logits[:, -1])
                compiled.append(len(graphs))
                addresses.append([t.data_ptr() for layer in cache.layers for t in (layer.keys, layer.values)])
            results.append(torch.stack(logits))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert compiled == [0, *[1] * STEPS], "a later step was compiled anew"
    assert all(at == addresses[0] for at in addresses), "the cache is not written in place"
    step = graphs[-1]
    ops = [n for n in step.nodes if str(n.target) == OP]
    assert len(ops) == models.FAMILIES[family].mla_sites
    assert len({n.args[5] for n in ops}) == 1, "every layer has lengths of its own"
    masks = {n.args[4] for n in ops}
    assert masks == {None} if not padded else all(m.meta["val"].shape == (2, 1, 1, ROOM) for m in masks)
    assert not [n for n in step.nodes if packet(n) in WAITS]
    values = [n.meta["val"] for n in step.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert all(isinstance(d, int) for v in values for d in v.shape)
