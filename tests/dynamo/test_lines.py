"""Nodes of a trace name the lines of the model that torch would name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.dynamo import entry
from mla_compile.dynamo.compiler import Compiler
from tests.support.toy import Toy, decode_inputs


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Toy(), nn.Sequential(Toy()))

    def forward(self, x: Any, *rest: Any) -> Any:
        return [layer(x + 1, *rest) for layer in (self.layers[0], *self.layers[1])]


def lines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    with monkeypatch.context() as patch, torch.no_grad():
        is_ours = Compiler._is_ours

        def noting(self: Compiler, gm: torch.fx.GraphModule, inputs: Any) -> bool:
            found.extend((node.name, re.sub(r"forward_\d+", "", node.stack_trace or "")) for node in gm.graph.nodes)
            return is_ours(self, gm, inputs)

        patch.setattr(Compiler, "_is_ours", noting)
        mla_compile.optimize(Deep().eval(), codegen="eager")(*decode_inputs())
    return found


def test_each_node_has_the_lines_that_torch_writes(monkeypatch: pytest.MonkeyPatch):
    ours = lines(monkeypatch)
    monkeypatch.setattr(entry, "remember_lines", lambda output: None)
    assert ours == lines(monkeypatch)
    assert len({stack for _, stack in ours}) > 5
