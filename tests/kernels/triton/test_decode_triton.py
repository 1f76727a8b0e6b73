"""The attention kernel against the reference in float64, in Triton's interpreter: every feature, on small sizes.

Rows that no query may see hold NaN in all cases, table entries past a request's length hold -1, and scratch starts as
NaN. Masks are in test_tiles_triton.py, splits in test_combine_triton.py.
"""

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


THREE_TOKENS = [Case(H=H, splits=2, S=3, causal=True) for H in (1, 12, 16, 20, 40, 64)]


@same(
    [Case(H=H, causal=True) for H in (1, 12, 16, 40)]
    + [Case(H=H, splits=2, S=3, causal=True) for H in (3, 8)]
    + also("combination", *(Case(H=H, causal=True) for H in (3, 8, 20, 64)), *THREE_TOKENS)
)
def test_heads_of_any_number(case: Case, run: Run):
    run(interpreter_cases.check, case)


def wide(page: int, widths: list[tuple[int, int]]) -> list[Case]:
    return [Case(L=L, R=R, H=5, page=page, splits=2) for L, R in widths]


@same(
    wide(0, [(512, 0), (17, 3), (130, 0)])
    + wide(16, [(512, 64), (256, 32), (1, 1)])
    + also("combination", *wide(0, [(512, 64), (256, 64), (40, 8), (1, 1)]), *wide(16, [(96, 16), (17, 3), (130, 0)]))
)
def test_widths(case: Case, run: Run):
    run(interpreter_cases.check, case)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_dtypes(dtype: torch.dtype, page: int, splits: int, run: Run):
    run(interpreter_cases.check, Case(dtype=dtype, page=page, splits=splits, H=6, S=2, causal=True))


@pytest.mark.parametrize(("page", "splits"), [(0, 1), (16, 2)])
@pytest.mark.parametrize("query", [(BF16, "sm_90"), (F16, "sm_80"), (F32, "sm_90")], ids=str)
@pytest.mark.parametrize("scale", ["tensor", "token"])
def test_fp8(scale: str, query: tuple[torch.dtype, str], page: int, splits: int, run: Run):
    dtype, device = query
    case = Case(dtype=FP8, kv_scale=scale, query_dtype=dtype, page=page, splits=splits, device=device)
    run(interpreter_cases.check, case)


def rope_in_half(scale: str, half: torch.dtype, page: int, device: str) -> Case:
    return Case(dtype=FP8, kv_scale=scale, query_dtype=half, rope_dtype=half, page=page, splits=2, device=device)


@same(
    [rope_in_half("tensor", BF16, 0, "sm_80"), rope_in_half("token", F16, 64, "sm_90")]
    + also("combination", rope_in_half("token", BF16, 0, "sm_80"), rope_in_half("tensor", F16, 64, "sm_90"))
    + [
        Case(dtype=FP8, kv_scale="group", query_dtype=query, rope_dtype=half, page=page, splits=n, device=device, L=L)
        for half, query, page, n, device, L in (
            (BF16, BF16, 0, 1, "sm_90", 64),
            (BF16, F32, 16, 2, "sm_90", 64),
            (F16, F16, 64, 2, "sm_80", 48),
        )
    ]
    + [Case(dtype=FP8, kv_scale=scale, R=0, S=2, causal=True, lens=(5, 90)) for scale in ("token", "group")]
)
def test_rope_and_scales_beside_fp8(case: Case, run: Run):
    run(interpreter_cases.check, case)


def test_every_fp8_value_is_converted_exactly(run: Run):
    got = run(interpreter_cases.every_fp8_value)
    want = torch.arange(256, dtype=torch.uint8).view(FP8).half()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("width", [(64, 16), (40, 8)], ids=str)
@pytest.mark.parametrize("joint", [False, True])
def test_caches_of_one_piece_and_of_two(joint: bool, width: tuple[int, int], splits: int, run: Run):
    L, R = width
    run(interpreter_cases.check, Case(joint=joint, L=L, R=R, splits=splits))


@pytest.mark.parametrize("batch", [((129, 0, 1, 64), 1, 3), ((33, 5, 130), 2, 1)], ids=str)
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("page", [1, 16, 64, *also("family", 32, 128)])
def test_pages(page: int, block_n: int, batch: tuple[tuple[int, ...], int, int], run: Run):
    lens, S, splits = batch
    run(
        interpreter_cases.check,
        Case(page=page, block_n=block_n, lens=lens, T=160, H=3, S=S, causal=True, splits=splits),
    )


@same(
    [
        Case(lens=(0, 0), splits=1),
        Case(lens=(0, 0), splits=4, page=16),
        Case(lens=(1, 0, 2, 96), S=4, causal=True, splits=2),
        Case(lens=(1, 0, 2, 96), S=4, causal=True, splits=7, page=16),
        Case(lens=(3, 1), S=4, causal=False),
        Case(lens=(1,), T=1),
        Case(lens=(96, 95), splits=9),
        Case(lens=(200, 3), T=96),  # a length beyond the cache counts as its end
        Case(lens=(-5, 3)),
    ]
)
def test_lengths(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [Case(S=S, H=H, causal=causal, lens=(60, 7)) for S, H in ((2, 16), (4, 5)) for causal in (False, True)]
    + also("combination", *(Case(S=S, H=H, lens=(60, 7)) for S, H in ((1, 5), (2, 5), (4, 16))))
    + also("combination", *(Case(S=S, H=H, causal=True, lens=(60, 7)) for S, H in ((1, 16), (2, 5), (4, 16))))
)
def test_several_query_tokens(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [
        Case(sinks=True),
        Case(sinks=True, splits=3, S=2, causal=True, lens=(1, 60)),
        Case(softcap=2.0, query_size=4.0),
        Case(softcap=30.0, splits=2, dtype=F32, page=16),
        Case(window=17, splits=3, S=3, causal=True, page=16),
        Case(window=1, S=2),
        Case(window=40, S=4, lens=(3, 96), sinks=True, softcap=9.0),
        Case(Lv=130, splits=2, L=40, R=8),
        *also("combination", Case(window=17), Case(Lv=24), Case(Lv=512, L=64, R=0, splits=2, dtype=F16)),
    ]
)
def test_sinks_softcap_window_values(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [
        Case(dtype=F16, query_dtype=F32, query_size=1e6, scale=2e-7),
        Case(dtype=F16, query_dtype=F32, query_size=1e30, scale=2e-31, splits=2),
        Case(dtype=F16, query_dtype=F32, query_size=1e-30, scale=2e29),
        Case(dtype=F16, query_dtype=F32, query_size=1e5, row_size=6e3, scale=3e-10, page=16, R=0),
        Case(dtype=F16, query_dtype=F32, softcap=3.0, S=2, causal=True),
        Case(dtype=BF16, query_dtype=F32, query_size=1e30, scale=2e-31),
        # With 64 rows the converted query goes through scratch.
        Case(dtype=F16, query_dtype=F32, query_size=1e6, scale=2e-7, block_m=64, H=33, S=2, causal=True, splits=2),
        Case(dtype=BF16, query_dtype=F32, block_m=64, H=70, page=16, L=40, R=8),
    ]
)
def test_float32_query_beside_half_precision_rows(case: Case, run: Run):
    run(interpreter_cases.check, case)


@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_visible_row_is_not_hidden(splits: int, run: Run):
    assert run(interpreter_cases.nan_in_a_visible_row, splits) == (True, True)


@same([Case(garbage=torch.inf), Case(garbage=torch.inf, mask="bool B11T", splits=2)])
def test_infinite_garbage(case: Case, run: Run):
    run(interpreter_cases.check, case)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_beyond_2_to_the_31_elements(paged: bool, listed: bool, run: Run):
    run(interpreter_cases.far_rows, paged, listed)


@pytest.mark.singly
@pytest.mark.parametrize("device", ["sm_80", "sm_90", *also("family", "sm_86", "sm_100")])
@pytest.mark.parametrize(("splits", "deterministic"), [(0, False), (3, False), (0, True)])
def test_the_planners_own_plans(device: str, splits: int, deterministic: bool, run: Run):
    case = Case(lens=(1090, 40), T=1152, H=24, L=128, R=32, page=64, device=device)
    plan = run(interpreter_cases.check_planned, case, splits, deterministic)
    assert plan.splits == (splits or (2 if deterministic else plan.splits))
