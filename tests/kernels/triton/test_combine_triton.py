"""Splits put together again, in Triton's interpreter; deterministic ones do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import interpreter_cases
from tests.support.interpreter_cases import FP8, Case, same
from tests.support.tiers import also

Run = Callable[..., Any]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@same(
    [
        *(Case(splits=2), Case(splits=5, page=16, least=64), Case(splits=16)),
        *also("combination", Case(), Case(splits=5)),
        *also("combination", *(Case(splits=n, page=16, least=64) for n in (1, 2, 16))),
    ]
)
def test_splits(case: Case, run: Run):
    run(interpreter_cases.check, case)


@pytest.mark.singly
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    "feature", [{"window": 50}, {"sinks": True, "S": 2, "causal": True}, *also("combination", {})], ids=str
)
def test_deterministic(page: int, feature: dict[str, Any], run: Run):
    case = Case(lens=(150, 31, 64, 0), T=192, page=page, chunk=64, H=3, **feature)
    run(interpreter_cases.alone_and_together, case, (160, 256))


@pytest.mark.singly
@pytest.mark.parametrize("dense", [False, True])
@same(
    [
        Case(lens=(700, 900), causal=True, S=2, block_n=32, device="sm_80", dtype=torch.float32),
        Case(lens=(640, 3), window=30, H=3, L=40, R=8),
        Case(lens=(640, 3), dtype=FP8, kv_scale="token"),
    ]
)
@pytest.mark.parametrize("splits", [0, 7])
def test_launches_bound_for_other_tokens_of_a_kind(case: Case, dense: bool, splits: int, run: Run):
    """The plan is for the most tokens of a kind, so that of fewer tokens the last splits may have none."""
    plans = run(interpreter_cases.launched_for_another_length, case, (192, 130, 176), splits, dense)
    assert len(plans) == 1
