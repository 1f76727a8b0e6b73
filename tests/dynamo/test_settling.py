"""``torch.compile(model, backend="mla")`` with decode state that changes in every step."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import mla_compile
from mla_compile.backend import mla
from mla_compile.dynamo.causes import changed_source, drained, failed
from tests.support.decode_state import OPTIONS, absorbed_runs
from tests.support.tiers import also
from tests.support.unsettled import GrowingBuffer, IntPosition, Layers


@pytest.mark.parametrize("state", [IntPosition, *also("family", GrowingBuffer)])
def test_state_that_changes_in_every_step_is_compiled_for_any_value(state: type[nn.Module], runs: list[int]) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Layers(state, 2).eval()
    fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    # A number that the model writes is known to change when the prompt was traced, a size once it has changed.
    most = 2 if state is IntPosition else 3
    with torch._dynamo.config.patch(recompile_limit=most), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absorbed_runs(fast, model, runs, count=4) == [1] * 5
    assert counters["stats"]["unique_graphs"] <= most
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
    axis = ":1" if "index 1" in reason else ""
    assert source is None or changed_source(reason, of_axis=True) == f"{changed_source(reason)}{axis}"


class Drains(nn.Module):
    """Tokens wait in an object that the caller keeps, until there are ``rate`` of them; then all stand for one row.

    The rows are counted there, too; what a row stands for is turned by its number.
    """

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.q = nn.Linear(6, 12, dtype=torch.float64)

    def forward(self, x: torch.Tensor, kept: list[dict[str, Any]]) -> torch.Tensor:
        waiting = torch.cat([kept[0]["waiting"], x], 1)
        full = waiting.shape[1] // self.rate * self.rate
        rows = kept[0]["rows"]
        if full:
            new = waiting[:, :full].unflatten(1, (-1, self.rate)).mean(2)
            turned = (torch.arange(new.shape[1]) + kept[0]["count"]).cos()
            rows = torch.cat([rows, new * turned[:, None]], 1)
        kept[0]["count"] += full // self.rate
        kept[0]["waiting"], kept[0]["rows"] = waiting[:, full:], rows
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k = torch.cat([rows, x], 1)[:, None].expand(-1, 2, -1, -1)
        return (q @ k.mT).softmax(-1) @ k


def nothing() -> list[dict[str, Any]]:
    return [{"count": 0} | {name: torch.zeros(2, 0, 6, dtype=torch.float64) for name in ("waiting", "rows")}]


@pytest.mark.parametrize(("door", "most"), [("backend", 6), *also("combination", ("optimize", 5))])
def test_what_fills_and_drains_is_compiled_for_any_size(door: str, most: int) -> None:
    torch.compiler.reset()
    model = Drains(5).eval()
    if door == "optimize":
        fast = mla_compile.optimize(model, codegen="eager")
    else:
        fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    given = [nothing() for _ in range(2)]
    counters.clear()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(23):
            if step == 12:
                found = counters["stats"]["unique_graphs"]
            x = torch.full((2, 1, 6), 0.1 * step, dtype=torch.float64)
            torch.testing.assert_close(fast(x, given[0]), model(x, given[1]))
        assert torch._dynamo.config.recompile_limit == 2, "the user's setting is left alone"
    assert counters["stats"]["unique_graphs"] == found <= most, "empty, some, full, and what was seen before"


class NoRope(nn.Module):
    """Keeps rows beside rotary keys of no width, as a model without positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 12, dtype=torch.float64)

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept[:] = torch.cat([kept[0], x], 1), torch.cat([kept[1], x[..., :0]], 1)
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k = torch.cat(kept, -1)[:, None].expand(-1, 2, -1, -1)
        return (q @ k.mT).softmax(-1) @ k


@pytest.mark.parametrize("door", ["optimize", *also("combination", "backend")])
def test_a_width_of_nothing_stays(door: str) -> None:
    torch.compiler.reset()
    model = NoRope().eval()
    if door == "optimize":
        fast = mla_compile.optimize(model, codegen="eager")
    else:
        fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    given = [[torch.zeros(1, 0, width, dtype=torch.float64) for width in (6, 0)] for _ in range(2)]
    with torch.no_grad():
        for step in range(4):
            x = torch.full((1, 1, 6), 0.1 * step, dtype=torch.float64)
            torch.testing.assert_close(fast(x, given[0]), model(x, given[1]))


class Emits(Drains):
    """The same, but takes what is full before it asks whether there is anything, as DeepSeek-V4's compressor does."""

    def forward(self, x: torch.Tensor, kept: list[dict[str, Any]]) -> torch.Tensor:
        waiting = torch.cat([kept[0]["waiting"], x], 1) if kept[0] else x
        full = waiting.shape[1] // self.rate * self.rate
        chunk, kept[0]["waiting"] = waiting[:, :full], waiting[:, full:]
        new = chunk.unflatten(1, (-1, self.rate)).mean(2) if chunk.shape[1] > 0 else chunk.new_zeros(2, 0, 6)
        kept[0]["rows"] = torch.cat([kept[0]["rows"], new], 1) if "rows" in kept[0] else new
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k = torch.cat([kept[0]["rows"], x], 1)[:, None].expand(-1, 2, -1, -1)
        return (q @ k.mT).softmax(-1) @ k


def test_what_has_not_drained_yet() -> None:
    """After a prompt of seven, two rows wait and one stands for five. That the first step makes none says the rest."""
    torch.compiler.reset()
    model = Emits(5).eval()
    fast = mla_compile.optimize(model, codegen="eager")
    given: list[list[dict[str, Any]]] = [[{}], [{}]]
    counters.clear()
    with torch.no_grad():
        for step in range(17):
            x = torch.full((2, 1 if step else 7, 6), 0.1 * step + 0.1, dtype=torch.float64)
            torch.testing.assert_close(fast(x, given[0]), model(x, given[1]))
    assert counters["stats"]["unique_graphs"] == 3, "the prompt, steps without a new row, and steps with one"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("0/2: tensor 'kwargs['cache'].layers[1].kept['a']' size mismatch at index 1. expected 0, actual 1", True),
        ("0/2: tensor 'kept[0]['rows']' size mismatch at index 1. expected 4, actual 0", True),
        ("0/2: tensor 'kwargs['cache'].layers[1].kept['a']' size mismatch at index 1. expected 1, actual 2", False),
        ("0/2: tensor 'kwargs['cache'].layers[1].kept['a']' size mismatch at index 0. expected 0, actual 2", False),
        ("0/2: tensor 'args[0]' size mismatch at index 1. expected 0, actual 2", False),
        ("0/2: kwargs['cache'].layers[1].count == 0", False),
    ],
)
def test_which_tensors_fill_and_drain(reason: str, said: bool) -> None:
    assert drained(reason) is said


def test_what_is_counted_of_a_failed_guard() -> None:
    size = "0/2: tensor 'kept[0]['a']' size mismatch at index 1. expected 3, actual 1"
    assert failed(size) == ("kept[0]['a']:1", "3")
    assert failed("0/7: self.pos == 11    # self.pos += 1") == ("self.pos", "11")
    assert failed("0/1: len(L['x']) == 5") == ("len(L['x'])", "5")
    assert failed("0/1: x is None") == ("x is None", "x is None")
