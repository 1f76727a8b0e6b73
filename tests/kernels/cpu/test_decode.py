"""The CPU kernels against the reference in float64, by each way to compute a call (conftest.py beside this file)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mla_compile import ops
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.cpu import decode as cpu
from tests.support.cpu_cases import TOLERANCE, Case, check, keys_before

LOW = torch.finfo(torch.float32).min
on_each_path = pytest.mark.usefixtures("path")
# Loops inside a test, not products of parameters, of which the default tier would show some by AMX alone.


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


SHAPES = [
    Case(T=1, L=1, R=1, H=1),
    Case(T=63, H=1),
    Case(T=64, L=63, R=0),
    Case(B=3, T=111, H=16),
    Case(B=2, T=1111, L=130, R=64, H=16),
    Case(T=2500, H=16, L=256),
    Case(T=5000, H=40, L=72, R=32),
    Case(Lv=24, T=700, H=16, L=192),
    Case(Lv=96, T=9, R=0),
    Case(S=5, T=111, causal=True),
    Case(S=7, T=7, causal=True, H=1),
    Case(S=9, T=4, causal=True),
    Case(S=40, T=2300, H=16, causal=True, B=2),
    Case(S=1, T=30, causal=True),
]


@on_each_path
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case):
    for strided in (False, True):
        check(replace(case, strided=strided))


@on_each_path
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(dtype: torch.dtype):
    for T, size in itertools.product((100, 2200), (1.0, 30.0)):
        check(Case(dtype=dtype, T=T, H=16, L=256, R=32, size=size, strided=True))


@on_each_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_query_with_half_rows_keeps_its_precision(dtype: torch.dtype):
    check(Case(dtype=dtype, query_dtype=torch.float32, T=700, H=16, L=256, size=10.0))


@on_each_path
def test_float32_query_may_exceed_float16():
    check(Case(dtype=torch.float16, query_dtype=torch.float32, size=1e6, scale=1e-6))


@pytest.mark.parametrize("scale", [1e-9, 0.2, 50.0])
def test_large_scales(scale: float):
    check(Case(dtype=torch.float64, T=2100, H=16, scale=scale))


MASKS = ["bool", "additive", "infinite", "lowest"]


@on_each_path
@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_every_form(kind: str):
    for shape in ("1111", "111T", "B11T", "1H1T", "11ST", "B1ST", "BHST", "BHS1"):
        for causal in (False, True):
            case = Case(B=2, S=5, H=3, T=111, causal=causal, strided=True)
            g = torch.Generator().manual_seed(1)
            sizes = [getattr(case, letter) if letter.isalpha() else 1 for letter in shape]
            sees = torch.rand(sizes, generator=g) < 0.6
            masks = {
                "bool": sees,
                "additive": torch.randn(sizes, generator=g),
                "infinite": torch.randn(sizes, generator=g).masked_fill(~sees, -torch.inf),
                "lowest": torch.zeros(sizes).masked_fill(~sees, LOW),
            }
            check(case, masks[kind])


@on_each_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_additive_mask_of_half_precision(dtype: torch.dtype):
    low = torch.finfo(dtype).min
    mask = torch.zeros(2, 1, 1, 111, dtype=dtype).masked_fill(~keys_before(111, 60, 100), low)
    check(Case(B=2, dtype=dtype), mask)


@on_each_path
def test_float64_lowest_value_stays_finite_in_float32():
    mask = torch.full((1, 1, 1, 111), torch.finfo(torch.float64).min, dtype=torch.float64)
    out, lse = ops.decode_attention(**Case().tensors(), mask=mask, scale=0.2)
    assert torch.isfinite(lse).all()
    mean = Case().tensors()["latent"].mean(dim=1)
    torch.testing.assert_close(out[0, 0, 0], mean[0], rtol=1e-4, atol=1e-5)


@on_each_path
@pytest.mark.parametrize("S", [1, 3, 140])
@pytest.mark.parametrize("lengths", [None, (2300, 0, 70), (64, 64, 64), (-5, 1, 9000)])
def test_lengths_and_windows(lengths: tuple[int, ...] | None, S: int):
    for causal, window in itertools.product((False, True), (0, 1, 37, 4000)):
        case = Case(B=3, S=S, T=300 if S > 1 else 2300, causal=causal, window=window, lengths=lengths, strided=True)
        check(case)
        if causal == (window > 0):  # also beside a mask
            check(case, torch.rand(3, 1, 1, case.T, generator=torch.Generator().manual_seed(1)) < 0.7)


@on_each_path
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_rows_past_a_length_are_not_read(fill: float):
    case = Case(B=2, T=2300, H=16, lengths=(70, 1000), strided=True)
    tensors = case.tensors()
    for name in ("latent", "rope"):
        tensors[name][~keys_before(case.T, 70, 1000)[:, 0, 0]] = fill  # type: ignore[index]
    check(case, tensors=tensors)


@on_each_path
@pytest.mark.parametrize("counts", [(70, 1000), (1, 2300), (64, 0)])
def test_unused_tail_does_not_reach_the_result(counts: tuple[int, int]):
    case = Case(B=2, T=2300, H=16, strided=True)
    sees = keys_before(case.T, *counts)
    for fill in (torch.nan, torch.inf):
        tensors = case.tensors()
        for name in ("latent", "rope"):
            tensors[name][~sees[:, 0, 0]] = fill  # type: ignore[index]
        for mask in (sees, torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)):
            out = check(case, mask, tensors)
            if 0 in counts:
                assert not out[1].any(), (fill, mask.dtype)


@on_each_path
def test_unused_tail_with_a_finite_mask_does_not_reach_the_result():
    case = Case(T=500, H=16)
    sees = keys_before(case.T, 77)
    clean, dirty = case.tensors(), case.tensors()
    dirty["latent"][0, 77:] = torch.nan  # type: ignore[index]
    mask = torch.zeros(sees.shape).masked_fill(~sees, LOW)
    want = ops.decode_attention(**clean, mask=mask, scale=0.2)[0]
    assert torch.equal(ops.decode_attention(**dirty, mask=mask, scale=0.2)[0], want)


@on_each_path
@pytest.mark.parametrize("values", [None, 24])
def test_row_between_visible_ones_that_no_query_sees_is_not_read(values: int | None):
    case = Case(B=2, T=300, Lv=values)
    tensors = case.tensors()
    sees = torch.rand(2, 1, 1, case.T, generator=torch.Generator().manual_seed(2)) < 0.5
    for x in (tensors["latent"], tensors["rope"], tensors["values"]):
        if x is not None:
            x[~sees[:, 0, 0]] = torch.nan
    check(case, sees, tensors)
    check(case, torch.zeros(sees.shape).masked_fill(~sees, -torch.inf), tensors)


@on_each_path
def test_nan_in_a_visible_row_is_not_hidden():
    tensors = Case().tensors()
    tensors["latent"][0, 3, 0] = torch.nan  # type: ignore[index]
    out, lse = ops.decode_attention(**tensors, mask=keys_before(111, 50), scale=0.2)
    assert torch.isnan(out).any()
    assert torch.isnan(lse).all()


@pytest.mark.parametrize("low", [False, True])
def test_masked_tail_is_not_computed(low: bool):
    sees = keys_before(9000, 100, 3000)
    mask = torch.zeros(sees.shape).masked_fill(~sees, LOW) if low else sees
    windows = cpu._windows(mask, cpu._seen(mask, 1, 9000, causal=False), 9000)
    assert [(w.lo, w.hi) for w in windows] == [(0, 100), (0, 3000)]


@on_each_path
def test_query_with_only_lowest_masked_keys_weighs_them_all():
    sees = torch.ones(1, 1, 3, 111, dtype=torch.bool)
    sees[:, :, 0] = False
    sees[..., 90:] = False
    check(Case(S=3), torch.zeros(sees.shape).masked_fill(~sees, LOW))
    # Causality can take the only keys that the mask left: queries 0 and 1 see lowest-masked keys alone.
    sees = torch.zeros(1, 1, 1, 111, dtype=torch.bool)
    sees[..., 110] = True
    check(Case(S=3, causal=True), torch.zeros(sees.shape).masked_fill(~sees, LOW))


@on_each_path
def test_autocast_does_not_lower_the_precision():
    case = Case(T=700, H=16, L=256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(case)


@on_each_path
@pytest.mark.wholly
@pytest.mark.parametrize(
    "case",
    [
        Case(B=3, T=700, H=5, L=77, R=13, Lv=19),
        Case(T=3001, H=20, L=96, R=32),
        Case(T=130, S=9, H=33, L=65, R=7, causal=True, strided=True),
        Case(B=5, T=900, H=16, L=64, R=32, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_any_number_of_threads(case: Case, threads: int):
    first = check(case, keys_before(case.T, *[case.T - 100 * b for b in range(case.B)]))
    again = check(case, keys_before(case.T, *[case.T - 100 * b for b in range(case.B)]))
    assert torch.equal(first, again)


@on_each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_awkward_widths(dtype: torch.dtype):
    for width in (1, 31, 33, 63, 100):
        for heads in (1, 17, 48):
            check(Case(B=2, T=66, H=heads, L=width, R=width // 2, dtype=dtype, strided=True, size=3.0))


@on_each_path
def test_rows_of_any_stride():
    case = Case(B=2, T=150, H=3)
    given = case.tensors()
    given["latent"] = given["latent"].transpose(1, 2).contiguous().transpose(1, 2)  # type: ignore[union-attr]
    given["rope"] = given["rope"][:1].expand(2, -1, -1)  # type: ignore[index]
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)  # type: ignore[union-attr]
    check(case, None, given)


@on_each_path
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"S": 0}])
def test_nothing_to_attend_to(sizes: dict[str, int]):
    case = Case(**sizes)
    out, lse = ops.decode_attention(**case.tensors(), scale=0.2)
    assert out.shape == (case.B, case.S, case.H, case.L)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@on_each_path
@pytest.mark.parametrize("size", [1.0, 8.0, 30.0])
def test_scores_are_as_precise_as_float32_allows(size: float, path: str):
    """Half precision would show here: scores of deviation up to 150, whose rounding moves the whole weight."""
    case = Case(T=1500, H=16, L=512, R=64, size=size)
    given = case.tensors()
    lse = ops.decode_attention(**given, scale=0.2)[1].double()
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    want = reference.decode_attention(DecodeCall(**exact, scale=0.2))[1]
    assert ((lse - want).abs() / want.abs()).max() <= 1e-6
