"""Rows that are rounded before a product: legal where their own largest number made the scale, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile.codes import Code
from tests.support.quantized import Attention, Int8, error, exact, inputs, optimized
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

FP8 = torch.float8_e4m3fn


def scale(x: Tensor, top: float = 127) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / top


def int_mm(layer: Int8, q: Tensor, s: Tensor, x: Tensor) -> Tensor:
    total = torch._int_mm(q.reshape(-1, q.shape[-1]), layer.weight.t())
    return (total.float() * s.reshape(-1, 1) * layer.scale).reshape(*x.shape[:-1], -1).to(x.dtype)


def divided(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s, x)


def by_reciprocal(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x * s.reciprocal()).round().to(torch.int8), s, x)


def by_one_over(layer: Int8, x: Tensor) -> Tensor:
    up = 127 / x.abs().amax(-1, keepdim=True)
    return int_mm(layer, torch.round(x * up).to(torch.int8), 1 / up, x)


def largest_of_dim(layer: Int8, x: Tensor) -> Tensor:
    s = x.float().abs().max(dim=-1, keepdim=True).values / 127 + 1e-9
    return int_mm(layer, (x.float() / s).round().to(torch.int8), s, x)


def flat_first(layer: Int8, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    s = rows.abs().amax(-1).div(127).clamp_min(1e-6)
    q = (rows / s[:, None]).round().clamp(-127, 127).to(torch.int8)
    total = torch._int_mm(q, layer.weight.t()).to(torch.float32)
    return (total * s.unsqueeze(-1) * layer.scale).unflatten(0, x.shape[:-1]).to(x.dtype)


def in_float(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x.float())
    q = (x.float() / s).round()
    return (F.linear(q, layer.weight.float()) * (s * 1.0) * layer.scale).to(x.dtype)


def one_scale(layer: Int8, x: Tensor) -> Tensor:
    s = x.abs().max() / 127
    total = torch._int_mm((x / s).round().to(torch.int8).flatten(0, 1), layer.weight.t())
    return (total.float() * s * layer.scale).unflatten(0, x.shape[:-1]).to(x.dtype)


def float8(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x.float(), 448)
    rows = (x.float() / s).clamp(-448, 448).to(FP8).float() * s
    return F.linear(rows.to(x.dtype), layer.weight.to(x.dtype) * layer.scale[:, None].to(x.dtype))


def float8_groups(layer: Int8, x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, 16))
    s = scale(groups, 448)
    rows = ((groups / s).to(FP8).float() * s).flatten(-2)
    return F.linear(rows, layer.weight.float() * layer.scale[:, None]).to(x.dtype)


def fake_quantized(layer: Int8, x: Tensor) -> Tensor:
    rows = torch.fake_quantize_per_tensor_affine(x.float(), 0.05, 0, -32768, 32767)
    return F.linear(rows, layer.weight.float() * layer.scale[:, None]).to(x.dtype)


def to_the_last_step(layer: Int8, x: Tensor) -> Tensor:
    """127.5 rounds to 128, which a clamp takes back: half a step of 127."""
    s = scale(x, 127.5)
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s, x)


def shifted(layer: Int8, x: Tensor, by: int = 128, off: int = 128, weight: Tensor | None = None) -> Tensor:
    """Bytes without a sign, as kernels for AVX512-VNNI want them; the sums of the weight take the shift off again."""
    s = scale(x.float())
    q = ((x.float() / s).round().clamp(-128, 127).to(torch.int8).to(torch.int32) + by).to(torch.uint8)
    sums = (layer.weight if weight is None else weight).sum(1, dtype=torch.int32) * off
    total = (F.linear(q.float(), layer.weight.float()) - sums.float()) * s
    return (total * layer.scale).to(x.dtype)


LEGAL = [
    shifted,
    to_the_last_step,
    divided, by_reciprocal, by_one_over, largest_of_dim, flat_first, in_float, one_scale, float8, float8_groups,
    fake_quantized,
]  # fmt: skip


RARE = (by_reciprocal, by_one_over, largest_of_dim, float8, flat_first, in_float, one_scale, fake_quantized)


@pytest.mark.parametrize("product", usual(LEGAL, rare=RARE))
def test_rounded_rows_are_absorbed_and_nearer_to_the_dequantized_model(product):
    """The absorbed form multiplies unrounded rows: nearer to float64 of the dequantized weights than the original."""
    torch.manual_seed(0)
    fast, after, before = optimized(Int8(product), verify=True)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED, site.reason
    assert any("no longer rounded" in note for note in site.notes)
    torch.manual_seed(0)
    truth = exact(Int8(product).dense())
    assert error(after, truth) <= 1.05 * error(before, truth)
    assert error(after, truth) < 0.02


IN_FLOAT = (float8, float8_groups, fake_quantized)
EXACTLY = (shifted, flat_first)


@pytest.mark.parametrize("product", usual((p for p in LEGAL if p not in IN_FLOAT), EXACTLY))
def test_exact_leaves_them(product):
    fast, after, before = optimized(Int8(product), quantized="exact")
    (site,) = fast.mla_report.sites
    assert site.code == Code.QUANTIZED_ROWS
    assert "rounded" in site.reason
    assert torch.equal(after, before)


@pytest.mark.parametrize("product", usual(IN_FLOAT, (float8_groups, fake_quantized)))
def test_exact_keeps_the_rounding_where_the_rounded_rows_are_rows(product):
    """Rows that are dequantized before the product are a latent like any other: absorbed, and rounded as they were."""
    torch.manual_seed(0)
    fast, after, before = optimized(Int8(product), torch.float32, quantized="exact", verify=True)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_scaled_mm():
    torch.manual_seed(0)
    weight = torch.randn(4 * 56, 64).to(FP8)
    scales = torch.rand(4 * 56) + 0.5

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", weight)
            self.register_buffer("scales", scales)

        def forward(self, x):
            s = scale(x.float(), 448)
            q = (x.float() / s).to(FP8).flatten(0, 1)
            how = (s.reshape(-1, 1), self.scales[None, :])
            return torch._scaled_mm(q, self.weight.t(), *how, out_dtype=torch.bfloat16).unflatten(0, x.shape[:-1])

    fast, after, before = optimized(Layer(), verify=True)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED, site.reason
    truth = exact(weight.double() * scales.double()[:, None])
    assert error(after, truth) <= error(before, truth)


def clipped(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x) / 2
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s, x)


def cut_off(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).to(torch.int8), s, x)


def floored(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).floor().clamp(-128, 127).to(torch.int8), s, x)


def ternary(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x, 1)
    return int_mm(layer, (x / s).round().to(torch.int8), s, x)


def scaled_twice(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s * s, x)


def never_scaled_back(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), torch.ones_like(s), x)


def scales_of_other_rows(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x.flip(1))
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s, x)


def scaled_back_in_another_order(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s.transpose(0, 1).contiguous(), x)


def scales_of_columns(layer: Int8, x: Tensor) -> Tensor:
    s = x.abs().amax(-1, keepdim=True)[:, :1].expand(-1, x.shape[1], -1) / 127
    return int_mm(layer, (x / s).round().clamp(-128, 127).to(torch.int8), s * 1, x)


def wrapping_around(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x, 127.5)
    return int_mm(layer, (x / s).round().to(torch.int8), s, x)


def unsigned(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    q = (x / s).round().to(torch.uint8).to(torch.float32)
    return (F.linear(q, layer.weight.float()) * s * layer.scale).to(x.dtype)


def sums_cut_to_a_byte(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    total = torch._int_mm((x / s).round().to(torch.int8).flatten(0, 1), layer.weight.t()).to(torch.int8)
    return (total.float() * s.reshape(-1, 1) * layer.scale).unflatten(0, x.shape[:-1]).to(x.dtype)


def float8_overflowing(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x.float(), 1000)
    rows = (x.float() / s).to(FP8).float() * s
    return F.linear(rows.to(x.dtype), layer.weight.to(x.dtype))


def shifted_by_less(layer: Int8, x: Tensor) -> Tensor:
    return shifted(layer, x, off=127)


def shifted_beyond_a_byte(layer: Int8, x: Tensor) -> Tensor:
    return shifted(layer, x, by=130, off=130)


def shifted_by_other_sums(layer: Int8, x: Tensor) -> Tensor:
    return shifted(layer, x, weight=layer.weight.flip(0))


def shifted_in_a_byte(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x.float())
    q = ((x.float() / s).round().clamp(-128, 127).to(torch.int8) + 100).float()
    total = F.linear(q, layer.weight.float()) - layer.weight.float().sum(1) * 100
    return (total * s * layer.scale).to(x.dtype)


def shifted_far(layer: Int8, x: Tensor) -> Tensor:
    """A million steps away, most of the rows' digits are lost in the sums."""
    s = scale(x.float())
    q = (x.float() / s).round().clamp(-128, 127) + 1000000
    total = F.linear(q, layer.weight.float()) - layer.weight.float().sum(1) * 1000000
    return (total * s * layer.scale).to(x.dtype)


def shifted_in_half(layer: Int8, x: Tensor) -> Tensor:
    """bfloat16 has whole numbers up to 256."""
    s = scale(x)
    q = (x / s).round().clamp(-128, 127) + 200
    total = F.linear(q.float(), layer.weight.float()) - layer.weight.float().sum(1) * 200
    return (total * s * layer.scale).to(x.dtype)


def shifted_sums_in_half(layer: Int8, x: Tensor) -> Tensor:
    s = scale(x)
    q = (x / s).round().clamp(-128, 127) + 128
    total = F.linear(q, layer.weight.to(x.dtype)) - layer.weight.float().sum(1) * 128
    return (total * s * layer.scale).to(x.dtype)


def shifted_before_it_is_rounded(layer: Int8, x: Tensor) -> Tensor:
    """One step for all that lies between -1 and 1: the shift is no part of the rows."""
    s = scale(x.float(), 1)
    total = F.linear((x.float() / s + 100).round(), layer.weight.float()) - layer.weight.float().sum(1) * 100
    return (total * s * layer.scale).to(x.dtype)


def rounded_to_multiples(layer: Int8, x: Tensor) -> Tensor:
    """Rounded to hundreds of steps, where zero decimals would be plain rounding."""
    s = scale(x.float(), 127)
    q = torch.round(x.float() / s, decimals=-2)
    return (F.linear(q, layer.weight.float()) * s * layer.scale).to(x.dtype)


def scale_of_whole_steps(layer: Int8, x: Tensor) -> Tensor:
    s = torch.div(x.float().abs().amax(-1, keepdim=True), 127, rounding_mode="floor") + 1e-5
    return (F.linear((x.float() / s).round(), layer.weight.float()) * s * layer.scale).to(x.dtype)


def scale_with_more_added(layer: Int8, x: Tensor) -> Tensor:
    s = torch.add(x.float().abs().amax(-1, keepdim=True), 1e-5, alpha=1e6) / 127
    return (F.linear((x.float() / s).round(), layer.weight.float()) * s * layer.scale).to(x.dtype)


def scale_above_a_tensor(layer: Int8, x: Tensor) -> Tensor:
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=layer.scale.max() * 1e4) / 127
    return (F.linear((x.float() / s).round(), layer.weight.float()) * s * layer.scale).to(x.dtype)


def scale_above_a_constant(layer: Int8, x: Tensor) -> Tensor:
    top = x.float().abs().amax(-1, keepdim=True)
    s = torch.maximum(top, torch.full_like(top, 10.0)) / 127
    return (F.linear((x.float() / s).round(), layer.weight.float()) * s * layer.scale).to(x.dtype)


ILLEGAL = [
    shifted_by_less, shifted_beyond_a_byte, shifted_by_other_sums, shifted_in_a_byte, shifted_before_it_is_rounded,
    shifted_far, shifted_in_half, shifted_sums_in_half,
    rounded_to_multiples, scale_of_whole_steps, scale_with_more_added, scale_above_a_tensor, scale_above_a_constant,
    clipped, cut_off, floored, ternary, scaled_twice, never_scaled_back, scales_of_other_rows,
    scaled_back_in_another_order, scales_of_columns, wrapping_around, unsigned, sums_cut_to_a_byte,
]  # fmt: skip


SELDOM = (
    shifted_by_less, shifted_in_half, shifted_sums_in_half, scale_with_more_added, scale_above_a_tensor, clipped,
    floored, scaled_back_in_another_order, never_scaled_back, unsigned, ternary, scale_above_a_constant,
    rounded_to_multiples,
)  # fmt: skip
"""Of which others show what is wrong: a shift, digits that are lost, a scale that is another one."""


@pytest.mark.parametrize("product", usual(ILLEGAL, rare=SELDOM))
def test_what_is_no_quantization_of_the_rows_is_refused(product):
    torch.manual_seed(0)
    fast, after, before = optimized(Int8(product))
    (site,) = fast.mla_report.sites
    assert site.code == Code.NONLINEAR, (site.code, site.reason)
    assert torch.equal(after, before)


def test_a_float8_cast_that_overflows_is_no_quantization():
    fast, after, before = optimized(Int8(float8_overflowing))
    (site,) = fast.mla_report.sites
    # The rows after the cast are rows like any other: absorbed with their overflow.
    assert site.verdict == "absorbed"
    assert not any("no longer rounded" in note for note in site.notes)
    assert torch.equal(after.isnan(), before.isnan())


def test_drawings_show_what_the_user_wrote(tmp_path):
    report = mla_compile.explain(Attention(Int8(divided)).eval(), *inputs())
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "absorbed" in page
    assert "stand_in" not in page
