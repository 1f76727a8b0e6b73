"""Rows rounded by torch's own quantization operators (``quantized_decomposed``), as pt2e writes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.codes import Code
from tests.support.quantized import H, L, N, V, error, exact, optimized
from tests.support.tiers import also

pytest.importorskip("torch.ao.quantization.fx._decomposed")
ops = torch.ops.quantized_decomposed


class Layer(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.weight = nn.Parameter(torch.randn(H * (N + V), L) / L**0.5, requires_grad=False)

    def forward(self, x):
        return F.linear(self.how(x.float()), self.weight).to(x.dtype)


def per_token(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros, -128, 127, torch.int8, torch.float32)


def symmetric_per_token(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros, -128, 127, torch.int8, torch.float32)


def per_tensor(x: Tensor) -> Tensor:
    scale, zero = ops.choose_qparams.tensor(x, -128, 127, 1e-9, torch.int8)
    q = ops.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
    return ops.dequantize_per_tensor.tensor(q, scale, zero, -128, 127, torch.int8)


@pytest.mark.parametrize("how", [per_token, per_tensor, *also("combination", symmetric_per_token)])
def test_rows_by_operators_of_torch(how):
    layer = Layer(how)
    fast, after, before = optimized(layer, verify=True)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED, site.reason
    assert any("no longer rounded to int8" in note for note in site.notes)
    truth = exact(layer.weight)
    assert error(after, truth) <= 1.05 * error(before, truth)


def another_zero_point(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros + 5, -128, 127, torch.int8, torch.float32)


def scales_of_another_tensor(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x * x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros, -128, 127, torch.int8, torch.float32)


def fewer_steps_than_it_was_chosen_for(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -8, 7, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros, -8, 7, torch.int8, torch.float32)


def other_zeros_in_a_symmetric_range(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros + 5, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros, -128, 127, torch.int8, torch.float32)


def other_zeros_taken_off(x: Tensor) -> Tensor:
    scales, zeros = ops.choose_qparams_per_token(x, torch.int8)
    q = ops.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return ops.dequantize_per_token(q, scales, zeros + 5, -128, 127, torch.int8, torch.float32)


def a_guard_that_rows_reach(x: Tensor) -> Tensor:
    scale, zero = ops.choose_qparams.tensor(x, -128, 127, 1.0, torch.int8)
    q = ops.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
    return ops.dequantize_per_tensor.tensor(q, scale, zero, -128, 127, torch.int8)


def a_scale_computed_from_the_rows(x: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int32)
    return torch.fake_quantize_per_tensor_affine(x, x.abs().mean().reshape(()), zero, -128, 127)


@pytest.mark.parametrize(
    "how",
    [
        other_zeros_taken_off,
        a_guard_that_rows_reach,
        scales_of_another_tensor,
        fewer_steps_than_it_was_chosen_for,
        *also("combination", other_zeros_in_a_symmetric_range, a_scale_computed_from_the_rows, another_zero_point),
    ],
)
def test_what_does_not_fit_keeps_its_rounding(how):
    """The dequantized rows are rows like any others: absorbed with all that was done to them."""
    fast, after, before = optimized(Layer(how), torch.float32)
    (site,) = fast.mla_report.sites
    assert not any("no longer rounded" in note for note in site.notes)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
