"""When compiled code of a step's graph is used again, and when the graph is compiled once more."""

from __future__ import annotations

import importlib
import logging

import torch

from mla_compile.batching.compiled import Compiled
from tests.support.programs import export


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_code_is_used_for_the_sizes_that_its_guards_allow(monkeypatch, caplog):
    """Without Inductor: its stand-in asks whether a size is even, as code for complex rotations does."""
    asked = []

    def compile_fx(gm, examples, config_patches):
        assert config_patches == {"cpp_wrapper": False}
        asked.append(bool(examples[0].shape[0] % 2 == 0))
        return gm.forward

    monkeypatch.setattr(importlib.import_module("torch._inductor.compile_fx"), "compile_fx", compile_fx)
    program = export(Doubled(), [torch.randn(4, 3)], ({0: torch.export.Dim("n")},))
    graph = Compiled(program, {"cpp_wrapper": False}, limit=2, name="a step")
    for count in (4, 6, 3, 5, 8, 4):
        x = torch.randn(3, count).mT  # not dense
        (out,) = graph(x)
        assert torch.equal(out, x * 2)
    assert asked == [True, False]
    assert graph.count == 2
    one = torch.randn(1, 3).as_strided((1, 3), (7, 1))  # torch compiles for a size of 1 alone
    with caplog.at_level(logging.WARNING, "mla_compile"):
        assert torch.equal(graph(one)[0], one * 2)
    assert "a step: compiled 2 times, the limit; sizes (1,) run uncompiled" in caplog.text
    assert asked == [True, False]
