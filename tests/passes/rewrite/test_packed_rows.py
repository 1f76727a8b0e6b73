"""Models that keep float8 rows with scales themselves: the operator reads them in place, groups of columns included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile.passes.rewrite import packed_rows
from tests.support.tiers import also

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
D, H, N, R, V, L, G = 20, 3, 6, 4, 5, 32, 4
B, T = 2, 70

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("native_kernel"),
]


def unflattened(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float().unflatten(-1, (G, L // G)) * scales[..., None]).flatten(-2).to(dtype)


def cast_last(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (scales.unsqueeze(-1) * rows.view(*rows.shape[:2], G, L // G).to(torch.float32)).to(dtype).view(rows.shape)


def repeated(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() * scales.repeat_interleave(L // G, -1)).to(dtype)


def expanded(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    spread = scales[..., None].expand(-1, -1, -1, L // G).reshape(rows.shape)
    return (rows.float() * spread).to(dtype)


def in_the_models_dtype(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.to(dtype).unflatten(-1, (G, L // G)) * scales[..., None].to(dtype)).flatten(-2)


def of_the_row(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() * scales[..., :1]).to(dtype)


def of_the_row_over_groups(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float().unflatten(-1, (G, L // G)) * scales[..., :1, None]).flatten(-2).to(dtype)


def across_groups(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float().unflatten(-1, (L // G, G)) * scales[..., None, :]).flatten(-2).to(dtype)


def tiled(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() * scales.repeat(1, 1, L // G)).to(dtype)


def of_columns(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() * scales[0, 0].repeat_interleave(L // G)).to(dtype)


def of_tokens_alone(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float().unflatten(-1, (G, L // G)) * scales[:1, :, :, None]).flatten(-2).to(dtype)


def in_another_order(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float().unflatten(-1, (L // G, G)).mT * scales[..., None]).flatten(-2).to(dtype)


def in_float64(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.double().unflatten(-1, (G, L // G)) * scales[..., None].double()).flatten(-2).to(dtype)


class Attention(nn.Module):
    """A decode step over cached rows; ``dequantize`` makes the latent of values and scales."""

    def __init__(self, dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(D, H * (N + R), bias=False)
        self.up = nn.Linear(L, H * (N + V), bias=False)
        self.dequantize = dequantize

    def forward(self, x: Tensor, rows: Tensor, scales: Tensor, rope: Tensor) -> Tensor:
        q = self.q(x).view(B, -1, H, N + R).transpose(1, 2)
        kv = self.up(self.dequantize(rows, scales, x.dtype)).view(B, -1, H, N + V).transpose(1, 2)
        k = torch.cat([kv[..., :N], rope[:, None].expand(-1, H, -1, -1)], -1)
        return F.scaled_dot_product_attention(q, k, kv[..., N:]).transpose(1, 2).flatten(2)


def numbers(dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(B, T, L, generator=g).to(FP8)
    scales = torch.rand(B, T, G, generator=g) + 0.5
    return torch.randn(B, 1, D, generator=g).to(dtype), rows, scales, torch.randn(B, T, R, generator=g).to(dtype)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many attentions were handed float8 rows, by graph."""
    found: list[int] = []
    original = packed_rows.read_packed

    def counted(*args: Any) -> int:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr("mla_compile.passes.rewrite.packed_rows.read_packed", counted)
    torch.compiler.reset()
    return found


def check(model: nn.Module, given: tuple[Tensor, ...], exact: Tensor) -> None:
    """The result is no farther from the one in float64 than the original's."""
    fast = mla_compile.optimize(model, codegen="eager", forms="absorbed", strict=True)
    with torch.no_grad():
        got, plain = fast(*given), model(*given)
    assert [str(site.code) for site in fast.mla_report.sites] == ["absorbed"]
    error, allowed = ((y.double() - exact).norm() / exact.norm() for y in (got, plain))
    assert error <= 1.2 * allowed + 1e-6


@pytest.mark.singly
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("dequantize", "in_place"),
    [
        *((d, 1) for d in (repeated, in_the_models_dtype, of_the_row_over_groups)),
        *((d, 0) for d in (across_groups, of_tokens_alone)),
        *also("combination", *((d, 1) for d in (unflattened, cast_last, expanded, of_the_row))),
        *also("combination", *((d, 0) for d in (tiled, of_columns, in_another_order, in_float64))),
    ],
    ids=lambda d: getattr(d, "__name__", str(d)),
)
def test_spellings(dequantize: Callable[..., Tensor], in_place: int, dtype: torch.dtype, read: list[int]):
    model, given = Attention(dequantize).to(dtype), numbers(dtype)
    rounded = tuple(x.to(dtype).double() if dequantize is in_the_models_dtype else x.double() for x in given[2:3])
    with torch.no_grad():
        exact = Attention(dequantize).to(dtype).double()(given[0].double(), given[1], *rounded, given[3].double())
    check(model, given, exact)
    assert read == [in_place]


@pytest.mark.parametrize(("groups", "in_place"), [(8, 0), *also("combination", (3, 1))])
def test_groups_of_a_power_of_two_columns(groups: int, in_place: int, read: list[int]):
    """Others the operator does not take: 24 columns in groups of 8, and of 3."""

    def dequantize(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (rows.float().unflatten(-1, (groups, -1)) * scales[..., None]).flatten(-2).to(dtype)

    model = Attention(dequantize)
    model.up = nn.Linear(24, H * (N + V), bias=False)
    x, rows, _, rope = numbers(BF16)
    given = (x, rows[..., :24], torch.rand(B, T, groups, generator=torch.Generator().manual_seed(2)) + 0.5, rope)
    with torch.no_grad():
        exact = model.to(BF16).double()(x.double(), given[1], given[2].double(), rope.double())
    check(model.to(BF16), given, exact)
    assert read == [in_place]


def test_rows_of_bytes(read: list[int]):
    """Values, scales and rotary key of a row one after the other in one buffer, as FlashMLA keeps them."""

    def parts(held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return held[..., :L].view(FP8), held[..., L : L + 4 * G].view(torch.float32), held[..., L + 4 * G :].view(BF16)

    class Bytes(Attention):
        def forward(self, x: Tensor, held: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, *parts(held))

    x, *given = numbers(BF16)
    held = torch.empty(B, T, L + 4 * G + 2 * R, dtype=torch.uint8)
    for part, values in zip(parts(held), given, strict=True):
        part.copy_(values)
    model = Bytes(unflattened).to(BF16)
    with torch.no_grad():
        exact = Attention(unflattened).to(BF16).double()(x.double(), given[0], given[1].double(), given[2].double())
    check(model, (x, held), exact)
    assert read == [1]
