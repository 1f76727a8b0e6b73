"""Products of rows with a weight: against float64, by the native kernel, in float32 and by torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.errors import InputError
from mla_compile.kernels import linear
from mla_compile.kernels.cpu import native

product: Callable[..., Tensor] = torch.ops.mla_compile.linear.default
few_rows_of_heads: Callable[..., Tensor] = torch.ops.mla_compile.few_rows_of_heads.default
BOUND = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

pytestmark = pytest.mark.usefixtures("kernel")


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    got = product(x, weight, bias)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    given = (x.shape, weight.shape, bias is not None)
    assert (got.shape, got.dtype) == (want.shape, x.dtype), given
    assert (got.double() - want).norm() <= BOUND[x.dtype] * max(float(want.norm()), 1e-30), given


ROWS: list[tuple[int, ...]] = [(), (1,), (2,), (3,), (1, 1), (2, 2), (1, 4, 1), (5,), (3, 3), (0,)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_rows_and_widths(dtype: torch.dtype):
    for O, K in [(1, 1), (7, 31), (64, 64), (130, 96), (65, 2051), (5, 4200)]:  # noqa: E741
        weight, bias = seeded(O, K, dtype=dtype, seed=1), seeded(O, dtype=dtype, seed=2)
        for rows in ROWS:
            x = seeded(*rows, K, dtype=dtype)
            check(x, weight)
            check(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(dtype: torch.dtype):
    wide = seeded(40, 200, dtype=dtype)
    x = seeded(6, 300, dtype=dtype)
    check(x[::2, :70], wide[::2, 3:73], seeded(40, dtype=dtype)[::2])
    check(x[:2, ::2][:, :40], wide.t()[:, :40])  # a weight whose columns lie in one piece
    check(x[:1, :70].expand(3, -1), wide[:1, :70].expand(9, -1))
    check(x[:3, :0], wide[:, :0])
    check(x[:3, :70], wide[:0, :70])


def test_threads_do_not_change_a_number():
    x, weight, before = seeded(3, 512), seeded(2000, 512, seed=1), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)
    alone = torch.cat([product(row[None], weight) for row in x])
    torch.testing.assert_close(alone, results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_shows(dtype: torch.dtype):
    x, weight = seeded(2, 100, dtype=dtype), seeded(8, 100, dtype=dtype, seed=1)
    weight[3, 99] = torch.nan
    x[1, 0] = torch.inf
    got = product(x, weight)
    assert got[0].isnan().tolist() == [n == 3 for n in range(8)]
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 9])
def test_autocast_changes_neither_dtype_nor_precision(rows: int):
    x, weight = seeded(rows, 64), seeded(8, 64, seed=1)
    want = product(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(x, weight), want)


def test_in_a_compiled_graph_and_counted():
    weight, bias = seeded(40, 24), seeded(40)

    def fn(x: Tensor) -> Tensor:
        return product(x, weight, bias).relu()

    x = seeded(2, 3, 24)
    torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend="aot_eager")(x), fn(x))
    with FlopCounterMode(display=False) as counted:
        fn(x)
    assert counted.get_total_flops() == 2 * 6 * 24 * 40
    torch.library.opcheck(
        product,
        (x[0], weight, bias),
        test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"],
    )


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), None, r"x is \[2, 3\] and weight \[4, 5\]"),
        (torch.ones(()), torch.ones(4, 5), None, "expected .*K"),
        (torch.ones(2, 3), torch.ones(4, 3, 1), None, r"weight \[4, 3, 1\]"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(3), r"bias is \[3\], expected \[O\] = \[4\]"),
        (torch.ones(2, 3), torch.ones(4, 3).double(), None, "expected one dtype"),
        (torch.ones(2, 3), torch.ones(4, 3, device="meta"), None, "one device"),
    ],
)
def test_wrong_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, message: str):
    with pytest.raises(InputError, match=message):
        linear.run(x, weight, bias)


def test_no_more_rows_than_asked_for(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    multiply = native.few_rows_product
    monkeypatch.setattr(native, "few_rows_product", lambda *args: (taken.append(args[1].shape[1]), multiply(*args))[1])
    weight = seeded(40, 24)
    for rows in (1, 2, 3):
        x = seeded(rows, 24)
        torch.testing.assert_close(product(x, weight, None, 2), F.linear(x, weight))
    assert taken == ([1, 2] if native.load() is not None else [])


def test_gradients_are_refused():
    with pytest.raises(InputError, match="gradient"):
        product(torch.ones(1, 3, requires_grad=True), torch.ones(4, 3))


HEADS = [
    (1, 1, 1),
    (3, 7, 31),
    (2, 130, 96),
    (2, 513, 33),
    (4, 65, 700),
    (2, 1100, 7),
    (2, 600, 1),
    (2, 1, 40),
    (2, 0, 5),
]
STORED = [
    *((torch.float32, stored) for stored in (torch.float32, torch.bfloat16, torch.int8)),
    *((torch.bfloat16, stored) for stored in (torch.bfloat16, torch.int8)),
    (torch.float64, torch.float64),
]


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return (seeded(*shape) * (40 if dtype == torch.int8 else 1)).clamp(-128, 127).to(dtype)


@pytest.mark.parametrize(("dtype", "stored"), STORED, ids=str)
def test_a_weight_for_each_head(dtype: torch.dtype, stored: torch.dtype):
    """Contiguous along either axis, or within a larger tensor; rows with any strides."""
    for rows, (G, O, K) in itertools.product([(), (1,), (2, 3), (17,), (0,)], HEADS):  # noqa: E741
        weight, wide = numbers(G, O, K, dtype=stored), numbers(G, 2 * O + 3, K + 5, dtype=stored)
        for w in (weight, weight.mT.contiguous().mT, wide[:, 3 : 3 + O, 2 : 2 + K], wide.mT[:, 1 : 1 + K, :O].mT):
            x = seeded(*rows, G, K + 2, dtype=dtype)[..., 1 : 1 + K].movedim(-2, 0)
            got, want = few_rows_of_heads(x, w), torch.einsum("g...k,gok->g...o", x.double(), w.double())
            assert (got.shape, got.dtype) == (want.shape, dtype)
            assert (got - want).norm() <= BOUND[dtype] * max(float(want.norm()), 1e-30), (rows, G, O, K, w.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_in_int8_are_read_as_they_are(dtype: torch.dtype):
    for O, K in [(7, 31), (130, 96), (65, 2051), (5, 9000)]:  # noqa: E741
        for rows in (1, 2, 4, 5):
            check(seeded(rows, K, dtype=dtype), numbers(O, K, dtype=torch.int8), seeded(O, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_scales_and_zero_points_for_groups_of_columns(dtype: torch.dtype, scale: torch.dtype):
    for (O, K, g), zeros, rows in itertools.product(  # noqa: E741
        [(1, 32, 32), (7, 96, 32), (130, 256, 64), (65, 2080, 32), (3, 2080, 2080), (66, 48, 24), (5, 4096, 128)],
        (False, True),
        (1, 2, 4, 5),
    ):
        codes, scales = numbers(O, K, dtype=torch.int8), seeded(O, K // g, dtype=scale, seed=3)
        points = numbers(O, K // g, dtype=torch.int8) if zeros else None
        exact = (codes.view(O, -1, g).double() - (0 if points is None else points[..., None].double())).clone()
        weight = (exact * scales[..., None].double()).view(O, K)
        x, bias = seeded(rows, K + 2, dtype=dtype)[:, 1:-1], seeded(O, dtype=dtype)
        # Slices: rows of the codes, scales and zero points that are not contiguous.
        wide = [torch.cat([t, t], 1)[:, : t.shape[1]] for t in (codes, scales, points) if t is not None]
        for given in ([codes, scales, points], [*wide, None][:3]):
            got = product(x, given[0], bias, 4, *given[1:])
            want = F.linear(x.double(), weight, bias.double())
            assert (got.shape, got.dtype) == (want.shape, dtype)
            # Torch rounds the scaled weight to the dtype of x; the kernel does not.
            size = F.linear(x.double().abs(), weight.abs(), bias.double().abs())
            assert (got.double() - want).norm() <= 2 * BOUND[dtype] * size.norm(), (O, K, g, zeros, rows)


def test_large_zero_points_cost_no_digits():
    """Codes close to their zero point, and rows of one sign: a difference of two large sums would lose digits."""
    K = 4096
    x, scales = seeded(2, K).abs() + 1000, seeded(8, K // 128).abs()
    zeros = torch.full((8, K // 128), -120, dtype=torch.int8)
    codes = (numbers(8, K, dtype=torch.int8) % 3 - 121).to(torch.int8)
    weight = ((codes.view(8, -1, 128).double() + 120) * scales[..., None].double()).view(8, K)
    got, want = product(x, codes, None, 4, scales, zeros), F.linear(x.double(), weight)
    assert (got.double() - want).norm() <= BOUND[torch.float32] * F.linear(x.double(), weight.abs()).norm()


def test_outliers_beside_small_numbers_in_rows_for_codes():
    """Rows in bfloat16 become integers with a common unit. The outliers' codes are 0, so that the others count."""
    for large, K in itertools.product((1e2, 1e4, 1e6, 1e30), (64, 75)):
        x, codes = seeded(4, K, dtype=torch.bfloat16), numbers(9, K, dtype=torch.int8)
        x[:, [5, 40]] = large
        x[1, ::3] = 1e-3
        codes[:, [5, 40]] = 0
        scales = None if K % 32 else seeded(9, 2)
        weight = codes.double() if scales is None else (codes.view(9, 2, -1) * scales[..., None].double()).view(9, K)
        got, want = product(x, codes, None, 4, scales), F.linear(x.double(), weight)
        off, bound = (got.double() - want).norm(dim=1), 2 * BOUND[torch.bfloat16]  # torch rounds the scaled weight, too
        assert bool((off <= bound * want.norm(dim=1)).all()), (large, K)


def test_rows_of_any_size_for_codes():
    codes = numbers(9, 96, dtype=torch.int8)
    for factor in (0.0, 1e-32, 1e-20, 1e30, 1e34):
        x = seeded(3, 96, dtype=torch.bfloat16) * factor
        got, want = product(x, codes), F.linear(x.double(), codes.double())
        assert (got.double() - want).norm() <= BOUND[torch.bfloat16] * want.norm(), factor
    x = seeded(4, 96, dtype=torch.bfloat16)
    x[0, 7], x[1, 8], x[2, 9] = float("inf"), -float("inf"), float("nan")
    codes = codes.abs() + 1
    got = product(x, codes)
    assert bool(got[0].isposinf().all() and got[1].isneginf().all())
    assert bool(got[2].isnan().all() and got[3].isfinite().all())


def test_a_zero_point_of_zero_changes_nothing():
    x, codes, scales = seeded(2, 64), numbers(5, 64, dtype=torch.int8).abs() + 1, seeded(5, 2).abs()
    x[0, 3], x[1, 40] = float("inf"), float("nan")
    plain, with_zeros = (product(x, codes, None, 4, scales, z) for z in (None, torch.zeros(5, 2).to(torch.int8)))
    assert bool(plain[0].isposinf().all())
    assert bool(plain[1].isnan().all())
    assert torch.equal(plain[0], with_zeros[0])
    assert bool(with_zeros[1].isnan().all())


def test_few_rows_of_a_weight_with_scales_run_in_the_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    multiply = native.few_rows_product
    monkeypatch.setattr(native, "few_rows_product", lambda *args: (calls.append(1), multiply(*args))[1])
    codes = numbers(6, 96, dtype=torch.int8)
    for rows, groups in itertools.product((1, 4, 5), (1, 3, 4)):
        calls.clear()
        product(seeded(rows, 96), codes, None, 4, seeded(6, groups))
        assert bool(calls) is (kernel == "native" and rows <= 4 and groups != 4)


HALVES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize("piece", [1, 1000, 1 << 22])
@pytest.mark.parametrize(("dtype", "stored"), HALVES, ids=str)
def test_many_rows_in_float32(dtype: torch.dtype, stored: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch):
    """Rounded once: no difference is larger than half a unit in the last place, and what float32 loses."""
    monkeypatch.setattr(linear, "_PIECE", piece)
    for (O, K), rows in itertools.product([(7, 31), (64, 96), (33, 300)], [(16,), (5, 7), (2, 3, 9)]):  # noqa: E741
        weight, bias = numbers(O, K, dtype=stored), seeded(O, dtype=dtype, seed=2)
        x = seeded(*rows, K + 2, dtype=dtype)[..., 1:-1]
        for added in (None, bias):
            got = product(x, weight, added, 0, wide=True)
            want = F.linear(x.double(), weight.double(), None if added is None else added.double())
            assert (got.shape, got.dtype) == (want.shape, dtype)
            half = torch.finfo(dtype).eps / 2
            lost = 1e-6 * F.linear(x.double().abs(), weight.double().abs())
            assert ((got - want).abs() <= half * want.abs() + lost + 1e-7).all(), (O, K, rows)


@pytest.mark.parametrize("rows", [0, 1, 15, 16])
def test_fewer_rows_than_many_are_not_widened(rows: int, kernel: str):
    x, weight = seeded(rows, 96, dtype=torch.bfloat16), seeded(64, 96, dtype=torch.bfloat16, seed=1)
    got = product(x, weight, None, 4, wide=True)
    in_float32 = F.linear(x.float(), weight.float()).bfloat16()
    if rows == 16:
        assert torch.equal(got, in_float32)
    elif kernel == "torch" or rows > 4:
        assert torch.equal(got, F.linear(x, weight))
    torch.testing.assert_close(got, in_float32, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("zeros", [False, True])
def test_many_rows_of_a_weight_with_scales_in_float32(zeros: bool):
    """The scaled weight is not rounded to 16 bits."""
    O, K, g = 33, 96, 32  # noqa: E741
    codes, scales = numbers(O, K, dtype=torch.int8), seeded(O, K // g, dtype=torch.bfloat16)
    points = numbers(O, K // g, dtype=torch.int8) if zeros else None
    exact = codes.view(O, -1, g).double() - (0 if points is None else points[..., None].double())
    weight = (exact * scales[..., None].double()).view(O, K)
    x = seeded(20, K, dtype=torch.bfloat16)
    got, want = product(x, codes, None, 0, scales, points, wide=True), F.linear(x.double(), weight)
    lost = 1e-6 * F.linear(x.double().abs(), weight.abs())
    assert ((got - want).abs() <= torch.finfo(torch.bfloat16).eps / 2 * want.abs() + lost).all()


CODES = torch.ones(4, 6, dtype=torch.int8)


@pytest.mark.parametrize(
    ("weight", "scales", "zeros", "message"),
    [
        (CODES, torch.ones(4, 4), None, r"scales and zeros are \[4, 4\], none; expected \[O,K/g\] .* \[4, 6\]"),
        (CODES, torch.ones(3, 2), None, r"\[3, 2\], none"),
        (CODES, torch.ones(4), None, r"\[4\], none"),
        (CODES, torch.ones(4, 0), None, r"\[4, 0\], none"),
        (CODES, None, CODES[:, :2], r"none, \[4, 2\]"),
        (CODES, torch.ones(4, 2), CODES[:, :3], r"\[4, 2\], \[4, 3\]"),
        (CODES, torch.ones(4, 2), torch.ones(4, 2), "torch.int8 on cpu, torch.float32 on cpu.*; expected torch.int8"),
        (CODES.float(), torch.ones(4, 2), None, "codes and scales are torch.float32 on cpu.*; expected torch.int8"),
        (CODES, torch.ones(4, 2).bfloat16(), None, "torch.bfloat16 on cpu; expected .*torch.float32"),
        (CODES, torch.ones(4, 2, device="meta"), None, "torch.float32 on meta"),
    ],
)
def test_wrong_scales(weight: Tensor, scales: Tensor | None, zeros: Tensor | None, message: str):
    with pytest.raises(InputError, match=message):
        linear.run(torch.ones(2, 6), weight, None, 4, scales, zeros)


def test_scales_in_a_compiled_graph():
    codes, scales = numbers(8, 64, dtype=torch.int8), seeded(8, 2)
    zeros = numbers(8, 2, dtype=torch.int8)
    torch.library.opcheck(
        product,
        (seeded(2, 64), codes, None, 4, scales, zeros),
        test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"],
    )


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4, 5), r"x is \[2, 3\] and weight \[2, 4, 5\]"),
        (torch.ones(3, 5), torch.ones(2, 4, 5), "expected .*G"),
        (torch.ones(5), torch.ones(4, 5), "expected .*G"),
        (torch.ones(2, 5).bfloat16(), torch.ones(2, 4, 5), "expected one dtype"),
        (torch.ones(2, 5), torch.ones(2, 4, 5, device="meta"), "one device"),
    ],
)
def test_wrong_arguments_of_heads(x: Tensor, weight: Tensor, message: str):
    with pytest.raises(InputError, match=message):
        linear.run_of_heads(x, weight)


def test_heads_in_a_compiled_graph_counted_and_without_gradients():
    x, weight = seeded(3, 2, 24), numbers(3, 40, 24, dtype=torch.int8)
    compiled = torch.compile(lambda x: few_rows_of_heads(x, weight).relu(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), few_rows_of_heads(x, weight).relu())
    with FlopCounterMode(display=False) as counted:
        few_rows_of_heads(x, weight)
    assert counted.get_total_flops() == 2 * 6 * 24 * 40
    torch.library.opcheck(
        few_rows_of_heads, (x, weight), test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    )
    with pytest.raises(InputError, match="gradient"):
        few_rows_of_heads(x.requires_grad_(), weight)


@pytest.fixture
def unmeasured() -> Iterator[None]:
    for measured in (linear._measured, linear._measured_many):
        measured.cache_clear()
    yield
    for measured in (linear._measured, linear._measured_many):
        measured.cache_clear()


@pytest.mark.usefixtures("unmeasured")
def test_it_pays_where_it_was_measured_to(kernel: str, monkeypatch: pytest.MonkeyPatch):
    """The clock is ours: each product takes as long as the test says."""
    seconds = {"torch": 3.0, "native": 2.0}
    taken: list[str] = []

    def timed(call: Callable[[], object]) -> float:
        before = len(calls)
        call()
        taken.append("native" if len(calls) > before else "torch")
        return seconds[taken[-1]]

    calls: list[int] = []
    multiply = native.few_rows_product
    monkeypatch.setattr(native, "few_rows_product", lambda *args: (calls.append(1), multiply(*args))[1])
    monkeypatch.setattr(linear, "timed", timed)
    cpu = torch.device("cpu")
    assert linear.pays(cpu, torch.bfloat16, torch.bfloat16, 1) is (kernel == "native")
    seconds["native"] = 2.9
    assert not linear.pays(cpu, torch.float32, torch.float32, 1)
    count = len(taken)
    assert not linear.pays(cpu, torch.float32, torch.float32, 1)  # measured once
    assert not linear.pays(cpu, torch.float32, torch.float32, linear.MOST + 1)
    assert not linear.pays(cpu, torch.float16, torch.float16, 1)
    assert not linear.pays(cpu, torch.float32, torch.bfloat16, 1)  # torch has no such product to compare with
    assert not linear.pays(torch.device("cuda"), torch.bfloat16, torch.bfloat16, 1)
    # Torch dequantizes a weight with scales in every call, so there is nothing to measure.
    assert linear.pays(cpu, torch.bfloat16, torch.int8, 4, 64) is (kernel == "native")
    assert not linear.pays(cpu, torch.bfloat16, torch.int8, 1, 48)
    assert not linear.pays(cpu, torch.bfloat16, torch.int8, linear.MOST + 1, 64)
    assert len(taken) == count


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("same", "float32", "packed", "plain", "int8", "groups"),
    [
        (3.0, 1.0, 2.0, torch.float32, torch.float32, torch.float32),
        (1.0, 3.0, 2.0, None, torch.bfloat16, None),  # torch's product of int8 is slower than one after a conversion
        (1.0, 3.0, 1.05, None, None, None),
        (3.0, 2.9, 1.0, None, None, None),
    ],
)
def test_many_rows_where_they_were_measured_to_be_faster(
    same: float, float32: float, packed: float, plain: Any, int8: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
):
    """The clock is ours: each way takes as long as the test says."""
    seconds = iter(itertools.cycle((same, float32)))
    monkeypatch.setattr(linear, "timed", lambda call: (call(), next(seconds))[1])
    cpu = torch.device("cpu")
    assert linear.many_rows(cpu, torch.bfloat16, torch.bfloat16) == plain
    seconds = iter(itertools.cycle((same, float32, packed)))
    assert linear.many_rows(cpu, torch.bfloat16, torch.int8) == int8
    monkeypatch.setattr(linear, "timed", None)  # measured once
    assert linear.many_rows(cpu, torch.bfloat16, torch.int8, 32) == groups
    assert linear.many_rows(cpu, torch.float32, torch.float32) is None
    assert linear.many_rows(cpu, torch.bfloat16, torch.float32) is None
    assert linear.many_rows(torch.device("cuda"), torch.bfloat16, torch.bfloat16) is None
