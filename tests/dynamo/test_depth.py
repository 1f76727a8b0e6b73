"""What the passes do for one more layer does not grow with the number of layers.

Calls of Python are counted, and not seconds: a machine that others use, too, makes no difference.
"""

from __future__ import annotations

from collections import Counter
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile import pipeline
from tests.support.calls import counted
from tests.support.compiling import compiler
from tests.support.programs import seeded
from tests.support.tiers import full
from tests.support.toy import D, Toy, decode_inputs

NOISE = 150
"""Calls that a cache of torch may leave to the one run or the other."""


class Deep(nn.Module):
    """Layers whose caches grow, each a size of its own to Dynamo."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Toy() for _ in range(layers))

    def forward(self, x: Tensor, kept: list[Any]) -> tuple[Tensor, list[Any]]:
        rows = []
        for layer, past in zip(self.layers, kept, strict=True):
            y, new = layer(x, past)
            x = x + y
            rows.append(new)
        return x, rows


def steps(layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[CodeType]:
    """What ran in the passes over a prompt, and over a step of any length."""
    torch._dynamo.reset()
    model, backend = Deep(layers).eval().requires_grad_(False), compiler(codegen="eager", verify=True)
    fast, counts = torch.compile(model, backend=backend), Counter[CodeType]()
    rows = [decode_inputs(cached=0)[1]] * layers
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(pipeline, "run", counted(pipeline.run, counts))
        for tokens in (9, 1):
            _, rows = fast(seeded(2, tokens, D, seed=tokens, dtype=torch.float32), rows)
    assert backend.reports[-1].absorbed == layers
    return counts


@full("combination")
def test_no_call_is_made_for_every_two_layers(monkeypatch: pytest.MonkeyPatch):
    steps(2, monkeypatch)  # what a process looks up once
    few, many = steps(5, monkeypatch), steps(10, monkeypatch)
    # Twice the layers: at most twice the calls, where calls for every two layers would be four times as many.
    bad = {code: (few[code], n) for code, n in many.items() if n > 2.3 * few[code] + NOISE}
    assert not bad, sorted((n, str(code)) for code, n in bad.items())[-20:]
    assert len(many) > 500
