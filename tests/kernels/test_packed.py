"""Codes of four bits, packed: against float64, and how the operator for products takes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import linear, packed
from mla_compile.kernels.cpu import native

product: Callable[..., Tensor] = torch.ops.mla_compile.linear.default
pack: Callable[..., Tensor] = torch.ops.mla_compile.pack_codes.default
BOUND = 4e-3  # of results rounded to bfloat16
KINDS = [torch.bfloat16, torch.float32]


def numbers(*shape: int, least: int = -8, end: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(least, end, shape, generator=generator, dtype=torch.int8)


def seeded(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def dequantized(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    wide = codes.double().view(*scales.shape, -1) - (0 if zeros is None else zeros[..., None].double())
    return (wide * scales[..., None].double()).view(codes.shape)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that the kernel has multiplied by packed codes."""
    if native.load() is None:
        pytest.skip("no native kernel here")
    found: list[int] = []
    multiply = native.packed_product
    monkeypatch.setattr(native, "packed_product", lambda *args: (found.append(args[1].shape[1]), multiply(*args))[1])
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_with_packed_codes(kind: torch.dtype, calls: list[int]):
    for (O, K, g), zeros in itertools.product(  # noqa: E741  the letter of the output's columns
        [(1, 32, 32), (16, 64, 64), (17, 96, 32), (130, 2080, 32), (3, 2080, 2080), (65, 4096, 128)], (False, True)
    ):
        codes, scales = numbers(O, K), seeded(O, K // g, dtype=kind)
        points = numbers(O, K // g, least=-128, end=127, seed=1) if zeros else None
        words = pack(codes, scales, points)
        assert (words.shape, words.dtype) == (packed.fake(codes, scales, points).shape, torch.int32)
        weight, bias = dequantized(codes, scales, points), seeded(O)
        for rows, extra in itertools.product((1, 2, 3, 4, 5, 9), (0, 3)):  # further columns: rows with a stride
            x = seeded(rows, K + extra)[:, extra:]
            for offset in (None, bias):
                calls.clear()
                got = product(x, codes, offset, 9, scales, points, words)
                assert calls == [rows]
                own = None if offset is None else offset.double()
                want, size = F.linear(x.double(), weight, own), F.linear(x.double().abs(), weight.abs())
                assert (got.shape, got.dtype) == (want.shape, torch.bfloat16)
                assert (got.double() - want).norm() <= BOUND * size.norm(), (O, K, g, zeros, rows)


def test_numbers_of_all_sizes(calls: list[int]):
    """Rows are scaled by powers of 16 on the way. Small ones must not vanish, and an outlier must not hide others."""
    O, K = 32, 128  # noqa: E741
    codes, scales = numbers(O, K), torch.ones(O, K // 32)
    words, weight = pack(codes, scales), dequantized(codes, scales, None)
    for x in (seeded(4, K) * 1e-30, seeded(4, K) * 1e30, torch.tensor(2.0).pow(torch.arange(K) % 60 - 30).bfloat16()):
        got, want = product(x, codes, None, 4, scales, None, words), F.linear(x.double(), weight)
        assert (got.double() - want).norm() <= BOUND * want.norm()
    lone, outlier = codes.clone(), seeded(1, K)
    lone[:, 5], outlier[0, 5] = 0, 1e6
    got = product(outlier, lone, None, 4, scales, None, pack(lone, scales))
    want = F.linear(outlier.double(), dequantized(lone, scales, None))
    assert (got.double() - want).norm() <= 0.1 * want.norm()  # float32 sums that have held 8e6
    for broken in (float("inf"), float("nan")):
        outlier[0, 5] = broken
        assert not product(outlier, codes, None, 4, scales, None, words)[:, codes[:, 5] != 0].isfinite().any()


@pytest.mark.parametrize("wide", [False, True])
def test_many_rows_are_multiplied_by_the_codes(wide: bool, calls: list[int]):
    codes, scales = numbers(24, 64), seeded(24, 2).abs()
    x = seeded(40, 64)
    got = product(x, codes, None, 4, scales, None, pack(codes, scales), wide=wide)
    want = F.linear(x.double(), dequantized(codes, scales, None))
    assert not calls
    assert (got.double() - want).norm() <= 2 * BOUND * want.norm()


CODES, SCALES = numbers(4, 64), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((CODES + 1, SCALES), r"codes are -\d to 8, expected -8 to 7; use dequantize"),
        ((CODES.float(), SCALES), r"torch.float32 \[4, 64\], torch.float32 \[4, 2\], none; expected torch.int8"),
        ((CODES, SCALES.half()), "torch.float16"),
        ((CODES, SCALES[:3]), r"\[3, 2\]"),
        ((CODES, torch.ones(4, 16)), "g a multiple of 8"),
        ((CODES, SCALES[:, :0]), r"\[4, 0\]"),
        ((CODES, SCALES, CODES), "torch.int8 .4, 64.; expected"),
        ((CODES, SCALES, SCALES), "torch.float32 .4, 2.; expected"),
    ],
)
def test_codes_that_cannot_be_packed(given: tuple[Tensor, ...], message: str):
    with pytest.raises(InputError, match=message):
        packed.pack(*given)


@pytest.mark.parametrize(
    ("x", "scales", "words"),
    [
        (seeded(2, 64), None, pack(CODES, SCALES)),
        (seeded(2, 64), SCALES, pack(CODES, SCALES)[:, :1]),
        (seeded(2, 64), SCALES, pack(CODES, SCALES).long()),
        (seeded(2, 64), SCALES, pack(CODES, SCALES.bfloat16())),
        (seeded(2, 64).float(), SCALES, pack(CODES, SCALES)),
    ],
    ids=["no scales", "shape", "dtype", "other scales", "rows in float32"],
)
def test_packed_codes_that_do_not_fit(x: Tensor, scales: Tensor | None, words: Tensor):
    with pytest.raises(InputError, match=r"packed is torch.int.* beside rows in torch"):
        product(x, CODES, None, 4, scales, None, words)


def test_packing_pays_where_a_measurement_says_so(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = [torch.device("cpu"), torch.bfloat16, torch.float32, 32]
    assert isinstance(linear.packs(*given), bool)
    for gain in (0.5, 2.0):
        monkeypatch.setattr(linear, "_measured_packed", lambda scales, threads, gain=gain: gain)
        assert linear.packs(*given) is (gain > 1 and native.load() is not None)
    for at, other in enumerate([torch.device("meta"), torch.float32, torch.float16, 24]):
        assert not linear.packs(*given[:at], other, *given[at + 1 :])
    monkeypatch.setattr(native, "load", lambda: None)
    assert not linear.packs(*given)


def test_the_operators_in_a_compiled_graph():
    torch.library.opcheck(pack, (CODES, SCALES, None))
    torch.library.opcheck(product, (seeded(2, 64), CODES, None, 4, SCALES, None, pack(CODES, SCALES)))
