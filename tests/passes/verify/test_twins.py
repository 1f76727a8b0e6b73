"""Sites that are the same computation are checked once. A fault in one of two such sites is found all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from torch import nn

from mla_compile import pipeline
from mla_compile.codes import Code
from mla_compile.options import Options
from mla_compile.passes.rewrite import absorb as absorb_pass
from mla_compile.passes.sources.records import AbsorbPlan
from mla_compile.pipeline import rewrites
from tests.support.modules import MLA, inputs, padded
from tests.support.programs import assert_equal, export
from tests.support.tiers import also

pytestmark = pytest.mark.thorough

OTHERS = {"keep": "drop", "drop": "keep", "zero": "nan", "nan": "zero"}
FOUND = {"scale", "empty", "kind", "fill", "causal", "window"}
"""Fields in which a fault shows in the numbers; the default tier tries no others."""


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (MLA(core="sdpa", bias=True).double() for _ in range(2))

    def forward(self, *given):
        return self.first(*given), self.second(*given)


def faults(value: Any, path: str = "plan") -> Iterator[tuple[str, Any]]:
    """``value`` with one thing in it changed, in each way: numbers, words, and how long tuples are."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for where, changed in faults(getattr(value, field.name), f"{path}.{field.name}"):
                yield where, replace(value, **{field.name: changed})
    elif isinstance(value, tuple):
        for k, one in enumerate(value):
            for where, changed in faults(one, f"{path}[]"):
                yield where, (*value[:k], changed, *value[k + 1 :])
        if value:
            yield f"{path} shorter", value[:-1]
            yield f"{path} turned", value[::-1]
    elif isinstance(value, bool):
        yield f"{path} is {not value}", not value
    elif isinstance(value, (int, float)):
        yield f"{path} larger", value + 1 if value != float("-inf") else -1.0
    elif isinstance(value, str) and value in OTHERS:
        yield f"{path} is {OTHERS[value]}", OTHERS[value]


def each_field(plan: AbsorbPlan) -> dict[str, AbsorbPlan]:
    """One fault for each field of each record: the entries of a tuple are alike."""
    found: dict[str, AbsorbPlan] = {}
    for where, changed in faults(plan):
        found.setdefault(where, changed)
    return found


@pytest.mark.parametrize("every", [False, *also("draws", True)])
def test_a_fault_in_a_field_of_one_plan_is_not_hidden_by_its_twin(every, monkeypatch):
    module, given = Twins(), [*inputs(S=16, T=20)[:3], padded(2, 16, 20)]
    program = export(module, given)
    plans: list[AbsorbPlan] = []
    tamper: Callable[[AbsorbPlan], AbsorbPlan] = lambda plan: plan  # noqa: E731  # replaced below

    def absorb(plan, *how, **more):
        plans.append(plan)
        return absorb_pass.absorb(plan if len(plans) % 2 else tamper(plan), *how, **more)

    monkeypatch.setattr(rewrites, "absorb_site", absorb)
    options = Options(verify=True, forms="absorbed", lowering="aten")
    assert pipeline.run(program, options).absorbed == 2
    found = []
    for where in each_field(plans[1]):
        field = where.partition(" ")[0].rpartition(".")[2]
        if not every and (field not in FOUND or field in found):  # one fault of each shows it
            continue
        plans.clear()
        tamper = lambda plan, where=where: each_field(plan)[where]  # noqa: E731
        try:
            outcome = pipeline.run(program, options)
        except Exception:  # noqa: BLE001  # a plan of what cannot be: nothing is rewritten
            continue
        first, second = (site.code for site in outcome.report.sites)
        assert first == Code.ABSORBED, where
        if second == Code.VERIFY_FAILED:
            found.append(field)
        assert_equal(module, outcome.program, given)
    assert set(found) >= FOUND
