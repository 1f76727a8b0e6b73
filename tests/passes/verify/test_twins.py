"""Sites that are the same computation are checked once. A fault in one of two such sites is found all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from mla_compile import pass_table, pipeline
from mla_compile.codes import Code
from mla_compile.options import Options
from mla_compile.passes.decide.records import AbsorbPlan
from mla_compile.passes.ir.axes import Atom
from mla_compile.passes.rewrite import absorb as absorb_pass
from mla_compile.passes.verify.comparison import Comparison
from tests.support.modules import MLA, inputs, padded
from tests.support.programs import assert_equal, export, seeded

pytestmark = pytest.mark.thorough

S, T = 16, 20  # as many rows as a comparison wants, in the fewest draws


class Masked(MLA):
    """Scores plus a bias, then cut by two masks: kept where one is true, dropped where the other is."""

    def attend(self, q, k, v, mask):
        keep, drop, bias = mask
        scores = (q @ k.mT * self.scale + bias).masked_fill(~keep, -1e9).masked_fill(drop, -5.0)
        return scores.softmax(-1) @ v


class Twins(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x, c, r, *masks):
        mask = masks if len(masks) > 1 else masks[0]
        return self.first(x, c, r, mask), self.second(x, c, r, mask)


def plain() -> tuple[Twins, list[Any]]:
    return Twins(lambda: MLA(core="sdpa", bias=True)), [*inputs(S=S, T=T)[:3], padded(2, S, T)]


def masked() -> tuple[Twins, list[Any]]:
    keep, drop = seeded(2, 1, S, T, seed=1) < 1, seeded(2, 1, S, T, seed=2) > 1
    return Twins(lambda: Masked(core="matmul")), [*inputs(S=S, T=T)[:3], keep, drop, seeded(2, 1, S, T)]


def faults(value: Any, path: str = "plan") -> Iterator[tuple[str, Any]]:
    """``value`` with one thing in it changed, in each way; what cannot be told from what it should be is left out."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for where, changed in faults(getattr(value, field.name), f"{path}.{field.name}"):
                yield where, replace(value, **{field.name: changed})
    elif isinstance(value, tuple) and value:
        for k, one in enumerate(value):
            for where, changed in faults(one, f"{path}[{k}]"):
                yield where, (*value[:k], changed, *value[k + 1 :])
        yield f"{path} shorter", value[:-1]
        if len(set(map(id, value))) > 1:
            yield f"{path} turned", value[::-1]
    elif isinstance(value, bool):
        yield f"{path} is {not value}", not value
    elif isinstance(value, (int, float)):
        yield f"{path} larger", value + 1 if value != float("-inf") else -1.0
    elif isinstance(value, str):
        for other in {"keep": ("drop",), "drop": ("keep", "add"), "add": ("keep",), "zero": ("nan",)}.get(value, ()):
            yield f"{path} is {other}", other
    elif value is not None and not isinstance(value, (Atom, fx.Node, torch.dtype, str)):
        return


def kinds(found: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """One fault for each field of each record: entries of a tuple are alike."""
    first: dict[str, Any] = {}
    for where, changed in found:
        first.setdefault("".join(c for c in where if not c.isdigit()), changed)
    return first


@pytest.mark.parametrize("make", [plain, masked])
def test_a_fault_in_a_field_of_one_plan_is_not_hidden_by_its_twin(make, monkeypatch):
    module, given = make()
    program = export(module.double(), given)
    options = Options(verify=True, forms="absorbed", lowering="aten")
    plans: list[AbsorbPlan] = []
    wrong: list[Callable[[AbsorbPlan], AbsorbPlan]] = [lambda plan: plan]

    def absorb(plan, *how, **more):
        plans.append(plan)
        second = len(plans) % 2 == 0
        return absorb_pass.absorb(wrong[0](plan) if second else plan, *how, **more)

    monkeypatch.setattr(pass_table, "absorb", absorb)
    outcome = pipeline.run(program, options)
    assert [s.code for s in outcome.report.sites] == [Code.ABSORBED] * 2
    seen = {"found": 0, "harmless": 0, "impossible": 0}
    for where in kinds(faults(plans[1])):
        plans.clear()
        wrong[0] = lambda plan, where=where: kinds(faults(plan))[where]
        try:
            outcome = pipeline.run(program, options)
        except Exception:  # noqa: BLE001  # a plan that says what cannot be: nothing is rewritten
            seen["impossible"] += 1
            continue
        first, second = (site.code for site in outcome.report.sites)
        assert first == Code.ABSORBED, where
        seen["found" if second == Code.VERIFY_FAILED else "harmless"] += 1
        assert_equal(module, outcome.program, given)
    print(seen)
