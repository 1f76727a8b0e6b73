"""``torch.compile(model, backend="mla")`` with decode state that changes in every step."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mla_compile.backend import mla
from mla_compile.dynamo.causes import changed_source
from tests.support.decode_state import OPTIONS, absorbed_runs
from tests.support.tiers import also
from tests.support.unsettled import GrowingBuffer, IntPosition, Layers


@pytest.mark.parametrize("state", [IntPosition, *also("family", GrowingBuffer)])
def test_state_that_changes_in_every_step_is_compiled_for_any_value(state: type[nn.Module], runs: list[int]) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Layers(state, 3).eval()
    fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=4), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absorbed_runs(fast, model, runs, count=8) == [1] * 9
    assert counters["stats"]["unique_graphs"] <= 3
    assert torch.compiler.config.dynamic_sources == ""


def test_other_functions_and_other_models_are_compiled_as_before(runs: list[int]) -> None:
    """Of a second model of that class nothing is symbolic but what changed in the first one."""
    torch._dynamo.reset()
    for _ in range(2):
        model = GrowingBuffer().eval()
        fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
        assert absorbed_runs(fast, model, runs, count=3) == [1] * 4

    class Counter(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    counters.clear()
    counted = torch.compile(Counter(), backend="eager")
    for _ in range(4):
        counted(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == 4, "torch's own choice"


@pytest.mark.parametrize(
    ("reason", "source"),
    [
        ("0/7: self.pos == 11    # self.pos += 1", "L['self'].pos"),
        ("0/1: L['self'].attn.pos == 3", "L['self'].attn.pos"),
        (
            "2/0: tensor 's._buffers['rows']' size mismatch at index 1. expected 11, actual 12",
            "L['s']._buffers['rows']",
        ),
        ("0/1: m._modules['layers']._modules['0'].k1 == 3", "L['m']._modules['layers']._modules['26'].k1"),
        ("0/1: L['m'].layers[0].pos == 3", "L['m'].layers[12].pos"),
        ("0/7: len(self.rows) == 7", None),
        ("0/7: G['pos'] == 7", None),
        ("None", None),
    ],
)
def test_the_name_of_what_changed(reason: str, source: str | None) -> None:
    assert source is None or re.fullmatch(changed_source(reason), source)
    assert source is not None or changed_source(reason) is None
