"""Lists of keys in the attention kernel, in Triton's interpreter, against the reference in float64.

Lists name keys in any order, among them -1, keys past the length and keys that something else hides. Rows that no query
sees, those that no list names included, hold NaN; so do places, and what is added to scores, until they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import interpreter_cases, list_cases
from tests.support.interpreter_cases import FP8, Case, same
from tests.support.tiers import also

Run = Callable[..., Any]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LISTED = Case(k=40, S=2, H=3, causal=True)


def long(k: int, splits: int, page: int) -> Case:
    return replace(LISTED, k=k, splits=splits, page=page, block_n=16)


LENGTHS, FORMS = (1, 16, 40, 96), ((1, 0), (3, 0), (1, 16), (2, 64))


@same(
    [long(k, *form) for k, form in zip(LENGTHS, FORMS, strict=True)]
    + also(
        "combination",
        *(long(40, 1, 0), long(96, 1, 16), long(40, 3, 0)),
        *(long(k, *form) for k in (1, 16) for form in FORMS if (k, form) not in ((1, (1, 0)), (16, (3, 0)))),
        *(long(40, 2, 64), long(96, 1, 0), long(96, 3, 0)),
    )
)
def test_lengths_of_lists(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [replace(LISTED, H=H) for H in (1, 16, 40)]
    + [replace(LISTED, H=20, splits=2, page=16)]
    + also("combination", *(replace(LISTED, H=H) for H in (3, 20)))
    + also("combination", *(replace(LISTED, H=H, splits=2, page=16) for H in (1, 3, 16, 40)))
)
def test_heads_of_any_number(case: Case, run: Run):
    """Row blocks of a query token stand beside those of the next along the grid's first axis."""
    run(interpreter_cases.check, case)


def typed(dtype: torch.dtype, page: int, splits: int, joint: bool) -> Case:
    return replace(LISTED, dtype=dtype, page=page, splits=splits, joint=joint)


@same(
    [
        *(typed(BF16, 0, 1, True), typed(F16, 1, 1, False), typed(F32, 32, 3, True)),
        replace(LISTED, dtype=F16, query_dtype=F32, block_m=64, H=70, page=16),
        *also(
            "combination",
            *(typed(BF16, 32, 3, True), typed(F32, 0, 1, True)),
            *(typed(dtype, 0, 3, False) for dtype in (BF16, F16, F32)),
            *(typed(dtype, 1, 1, False) for dtype in (BF16, F32)),
            *(typed(F16, 0, 1, True), typed(F16, 32, 3, True)),
            replace(LISTED, dtype=BF16, query_dtype=F32, block_m=64, H=70, page=16),
        ),
    ]
)
def test_dtypes(case: Case, run: Run):
    run(interpreter_cases.check, case)


def fp8(scale: str, page: int, splits: int, device: str) -> Case:
    return replace(LISTED, dtype=FP8, kv_scale=scale, page=page, splits=splits, device=device)


def rope_in_bf16(scale: str, page: int) -> Case:
    return replace(LISTED, dtype=FP8, kv_scale=scale, rope_dtype=BF16, splits=2, page=page)


@same(
    [
        *(fp8("tensor", 16, 2, "sm_90"), fp8("token", 64, 1, "sm_80")),
        *(rope_in_bf16("token", 16), rope_in_bf16("group", 0)),
        *also(
            "combination",
            *(fp8("tensor", 0, 1, "sm_80"), fp8("token", 0, 2, "sm_90")),
            *(fp8("tensor", 64, 1, "sm_80"), fp8("token", 16, 2, "sm_90")),
            rope_in_bf16("group", 16),
        ),
    ]
)
def test_fp8(case: Case, run: Run):
    run(interpreter_cases.check, case)


def at_random(*masks: str) -> list[Case]:
    return [replace(LISTED, mask=mask) for mask in masks]


def in_holes(*masks: str) -> list[Case]:
    return [replace(LISTED, mask=mask, sees="holes", splits=2) for mask in masks]


@same(
    at_random("bool 11S1", "half B1ST", "add 111T")
    + in_holes("bool B11T")
    + also("combination", *at_random("bool B11T", "bool B1ST", "add B1ST"))
    + also("combination", *in_holes("bool B1ST", "bool 11S1", "half B1ST", "add B1ST", "add 111T"))
    + [replace(LISTED, mask="lowest B1ST", splits=2), *also("combination", replace(LISTED, mask="lowest B1ST"))]
    + [replace(LISTED, mask="add B1ST", sees="nothing", window=20)]
    + also("combination", replace(LISTED, mask="bool B11T", sees="nothing", window=20))
)
def test_masks_that_remain(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [
        replace(LISTED, sinks=True, splits=2),
        replace(LISTED, softcap=2.0, query_size=4.0),
        replace(LISTED, window=17, page=16, splits=2),
        replace(LISTED, causal=False, page=16),
        replace(LISTED, Lv=130, splits=2, L=40, R=8, mask="bool B1ST"),
        replace(LISTED, R=0, page=32),
        replace(LISTED, L=17, R=3, splits=2),
        replace(LISTED, L=512, R=64, page=16),
        replace(LISTED, garbage=torch.inf, page=16),
        *also(
            "combination",
            replace(LISTED, sinks=True, page=16),
            replace(LISTED, window=17, causal=False),
            replace(LISTED, Lv=24),
            replace(LISTED, L=512, R=0, sinks=True, window=17, splits=2),
        ),
    ]
)
def test_other_features(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [
        replace(LISTED, lens=(0, 0), splits=2),
        replace(LISTED, lens=(0, 1, 96), page=16),
        replace(LISTED, lens=(200, -3), T=96),
        replace(LISTED, lens=(2, 60), splits=9, H=2),
        replace(LISTED, lens=(1,), T=1, k=1, S=1),
    ]
)
def test_lengths(case: Case, run: Run):
    run(interpreter_cases.check, case)


@pytest.mark.parametrize("page", [16, *also("combination", 0)])
def test_deterministic(page: int, run: Run):
    """Parts are cut at fixed places of the list: neither the batch nor the room for tokens changes a bit."""
    case = Case(lens=(150, 31, 0), T=192, page=page, chunk=64, H=2, k=150, S=2)
    run(interpreter_cases.alone_and_together, case, (160, 256))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_token_alone_and_among_others(splits: int, run: Run):
    run(list_cases.tokens_alone, replace(LISTED, causal=False, splits=splits, page=16))


@pytest.mark.parametrize("distance", ["pages", "tokens"])
def test_pages_that_do_not_lie_behind_each_other(distance: str, run: Run):
    run(list_cases.scattered_pages, distance)


@pytest.mark.parametrize("page", [0, 16])
def test_nan_in_a_visible_row_is_not_hidden(page: int, run: Run):
    assert run(list_cases.nan_in_a_named_row, page)


@pytest.mark.singly
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("k", "splits"), [(600, 0), (600, 7), (100, 0)])
def test_lists_that_grow_with_the_cache(k: int, splits: int, dense: bool, run: Run):
    """One launch for caches of several numbers of tokens, while a query names all of them or no more than k."""
    case = Case(lens=(700, 900), S=2, H=3, k=k, L=40, R=8)
    plans = run(interpreter_cases.launched_for_another_length, case, (192, 130, 176), splits, dense)
    assert len(plans) == 1


@pytest.mark.singly
@pytest.mark.parametrize("device", ["sm_80", "sm_90", *also("family", "sm_86", "sm_100")])
@pytest.mark.parametrize(("splits", "deterministic"), [(0, False), (3, False), (0, True)])
def test_the_planners_own_plans(device: str, splits: int, deterministic: bool, run: Run):
    case = Case(lens=(1090, 40), T=1152, H=24, L=128, R=32, page=64, device=device, k=1030)
    plan = run(interpreter_cases.check_planned, case, splits, deterministic)
    assert plan.splits == (splits or (2 if deterministic else plan.splits))
    assert plan.kernel == "triton"
