"""``fullgraph``, ``dynamic``, compilation layer by layer, and packages of whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import mla_compile
from mla_compile import backend
from mla_compile.codes import Code
from tests.support import models
from tests.support.models import build, prompt
from tests.support.tiers import also, full
from tests.support.toy import D, L, R, Toy

EAGER = {"codegen": "eager", "strict": True}


def session(step: Callable[..., Any], steps: int = 2) -> torch.Tensor:
    """The logits of a prompt and of decode steps after it."""
    out = step(input_ids=prompt(length=9, pad=0)["input_ids"], use_cache=True)
    logits = [out.logits[:, -1]]
    for _ in range(steps):
        last = logits[-1].argmax(-1, keepdim=True)
        out = step(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


def compiled(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend="mla", options=EAGER, **settings)


def optimized(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: mla_compile.optimize(model, **EAGER, **settings)


def by_layer(model: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="mla", options=EAGER)
    return model


def by_layer_in_place(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="mla", options=EAGER)
    return model


def by_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn = torch.compile(layer.self_attn, backend="mla", options=EAGER, fullgraph=True)
    return model


DOORS = {
    "fullgraph, dynamic": compiled(fullgraph=True, dynamic=True),
    "static": compiled(dynamic=False),
    "optimize, fullgraph": optimized(fullgraph=True),
    "optimize, dynamic": optimized(dynamic=True),
    "layers": by_layer,
    "layers in place": by_layer_in_place,
    "attentions": by_attention,
}


def layers(door: str) -> int:
    """One, but where it matters that several run the same code."""
    return 2 if door in ("layers", "layers in place", "attentions") else 1


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.self_attn = Toy(seed)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, rows = self.self_attn(x, rows)
        return x + y, rows


class Small(nn.Module):
    """Built and called as a model of transformers is."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed, self.head = nn.Embedding(models.VOCAB, D), nn.Linear(D, models.VOCAB)
        self.model.layers = nn.ModuleList(Block(seed) for seed in range(layers))

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        x, kept = self.model.embed(input_ids), []
        for index, layer in enumerate(self.model.layers):
            x, rows = layer(x, past_key_values[index] if past_key_values else x.new_zeros(x.shape[0], 0, L + R))
            kept.append(rows)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=kept)


# Settings of one door that another one is tried with, or dynamo/test_sizes.py a small model.
TOGETHER = ("fullgraph, dynamic", "optimize, dynamic", "layers in place", "attentions", "static")
# Experts by two of the doors; where every length is compiled at once they take too long.
TRIED = [
    *((door, "small", layers(door)) for door in DOORS if door not in TOGETHER),
    *also("combination", *((door, "minicpm3", 2) for door in TOGETHER)),
    *also("family", *((door, "minicpm3", 2) for door in DOORS if door not in TOGETHER)),
    *also("family", ("static", "deepseek_v3", 2), ("layers", "deepseek_v3", 2)),
]


@pytest.mark.parametrize(("door", "family", "layers"), TRIED)
def test_decoding_is_absorbed(door: str, family: str, layers: int) -> None:
    model = Small(layers).eval() if family == "small" else build(family, num_hidden_layers=layers)
    before = {id(report) for report in backend.reports()}
    with torch.no_grad():
        want = session(model)
        fast = DOORS[door](model)
        torch.testing.assert_close(session(fast), want, rtol=1e-4, atol=1e-4)
    reports = [r for r in backend.reports() if id(r) not in before]
    reports = [fast.mla_report] if hasattr(fast, "mla_report") else reports
    assert {site.code for report in reports for site in report.sites} == {Code.COST_PREFILL, Code.ABSORBED}


class Step(nn.Module):
    """A decode step whose cache is a list of tensors, which torch.export takes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache()
        for i in range(0, len(past), 2):
            cache.update(past[i], past[i + 1], i // 2)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits, *(rows for layer in out.past_key_values.layers for rows in (layer.keys, layer.values))


@full("family")  # test_api.py shows a package of a small module, and programs of it that need nothing of ours
def test_a_whole_model_in_a_package(tmp_path: Path) -> None:
    """One program for all lengths of the cache, through torch.export and AOTInductor."""
    model = build("minicpm3", num_hidden_layers=1)
    with torch.no_grad():
        out = model(input_ids=prompt(length=9, pad=0)["input_ids"], use_cache=True)
        past = [rows for layer in out.past_key_values.layers for rows in (layer.keys, layer.values)]
        ids, step = out.logits[:, -1:].argmax(-1), Step(model)
        tokens = torch.export.Dim("tokens", min=2, max=400)
        shapes = ({}, tuple({2: tokens} for _ in past))
        exported = torch.export.export(step, (ids, *past), dynamic_shapes=shapes)
        fast = mla_compile.optimize(exported)
        assert fast.graph_module.meta["mla_report"].absorbed == 1
        package = torch._inductor.aoti_compile_and_package(fast, package_path=str(tmp_path / "model.pt2"))
        run = torch._inductor.aoti_load_package(package)
        for rows in (past, [torch.cat([x, x], 2) for x in past]):
            for a, b in zip(run(ids, *rows), step(ids, *rows), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
