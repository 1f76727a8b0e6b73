"""Products with a weight for each head: by the operator that reads the weight once, as it is stored or kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile.kernels import linear
from mla_compile.kernels.cpu import native
from tests.support.quantized import Attention, H, Int8, L, N, V, attention, error, inputs
from tests.support.tiers import also

pytestmark = pytest.mark.thorough


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of rows and weights that the native kernel multiplies for heads; small weights are not left out."""
    if native.load() is None:
        pytest.skip("no native kernel here")
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    taken: list[tuple[torch.dtype, torch.dtype]] = []
    multiply = native.few_rows_product

    def recorded(library: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        if len(weight) == H:
            taken.append((x.dtype, weight.dtype))
            assert 1 in weight.stride()[1:]  # else each call copies it
        return multiply(library, x, weight, *rest)

    monkeypatch.setattr(native, "few_rows_product", recorded)
    return taken


def scaled_after(layer: Int8, x: Tensor) -> Tensor:
    """As torchao's weight-only int8."""
    return F.linear(x, layer.weight.to(x.dtype)) * layer.scale.to(x.dtype)


def rounded(layer: Int8, x: Tensor) -> Tensor:
    return F.linear(x, (layer.weight.float() * layer.scale[:, None]).to(x.dtype))


CASES: dict[str, tuple[Callable[[Int8, Tensor], Tensor] | None, torch.dtype, torch.dtype, int]] = {
    "dense": (None, torch.bfloat16, torch.bfloat16, 0),
    "float32": (None, torch.float32, torch.float32, 0),
    "int8, scaled after the product": (scaled_after, torch.bfloat16, torch.int8, 0),
    "int8, dequantized": (rounded, torch.bfloat16, torch.bfloat16, 2),
}


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        *((case, 16) for case in CASES),
        ("dense", 17),
        ("float32", 1),
        *also("combination", *((case, 17) for case in CASES if case != "dense")),
        *also("combination", *((case, 3) for case in CASES)),
    ],
)
def test_weights_are_read_once(case: str, batch: int, seen: list[tuple[torch.dtype, torch.dtype]]):
    """Two products in float32 up to sixteen rows; what takes more than an exact conversion is kept dequantized."""
    product, dtype, stored, kept = CASES[case]
    torch.manual_seed(0)
    torch._dynamo.reset()
    up = Int8(product) if product else torch.nn.Linear(L, H * (N + V), bias=False, dtype=dtype)
    module = Attention(up).eval()
    given = [x.to(dtype) for x in inputs(batch=batch)]
    fast: Any = mla_compile.optimize(module, codegen="eager", forms="absorbed", strict=True, verify=False)
    with torch.no_grad():
        got, before = fast(*given), module(*given)
        dense = up.dense() if isinstance(up, Int8) else up.weight.double()
        q, latent, rotary = (x.double() for x in given)
        truth = attention(q, latent @ dense.T, rotary)
    assert error(got, truth) <= max(1.1 * error(before, truth), 1e-6)
    if batch <= linear.MOST_OF_HEADS:
        assert seen == [(torch.float32, stored)] * 2
        assert next(p.changes for p in fast.mla_report.passes if p.name == "dequantize") == kept
    else:
        assert seen == []
