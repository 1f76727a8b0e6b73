"""The function through which a module's forward is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mla_compile.dynamo.entry import compiled_entry


def test_a_forward_is_compiled_while_another_thread_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)  # for the whole process, and not for a thread
    run = compiled_entry(compiler)
    monkeypatch.undo()
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    torch.testing.assert_close(run(model, (x,), {}), model(x))
    assert len(graphs) == 1
