"""Quantized linear layers as libraries make them: each from a dense layer, with the weight that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32
Made = tuple[nn.Module, Tensor]
"""A layer in place of a dense one, and its dense weight [out, in] in float64."""


def dense(layer: nn.Linear) -> Made:
    """As it is."""
    return layer, layer.weight.detach().double()


def torchao(name: str, **settings: Any) -> Callable[[nn.Linear], Made]:
    """``torchao.quantization.NAME(**settings)``; a granularity is given as its number."""

    def make(layer: nn.Linear) -> Made:
        from torchao import quantization

        given = {k: quantization.PerGroup(v) if "granularity" in k else v for k, v in settings.items()}
        held = nn.Sequential(layer)
        quantization.quantize_(held, getattr(quantization, name)(**given))
        weight: Any = held[0].weight
        return held[0], weight.dequantize().detach().double()

    return make


def nf4(layer: nn.Linear) -> Made:
    """Four bits of bitsandbytes, scales quantized again."""
    import bitsandbytes

    own = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16)
    own.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    own = own.to("cpu")
    return own, bitsandbytes.functional.dequantize_4bit(own.weight.data, own.weight.quant_state).double()


def bitsandbytes_int8(layer: nn.Linear) -> Made:
    """LLM.int8() without outliers."""
    import bitsandbytes

    own = bitsandbytes.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    own.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    own = own.to("cpu")
    own(torch.zeros(1, layer.in_features, dtype=layer.weight.dtype))  # which moves the weight to where it stays
    return Flat(own), own.state.CB.double() * own.state.SCB.double()[:, None] / 127


class Flat(nn.Module):
    """A layer given rows with two axes: the product of bitsandbytes takes no more than three."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The product, [..., in] -> [..., out]."""
        out: Tensor = self.layer(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], -1)


def _digits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers 0..15 [in, out] of a weight [out, in], scales and zero points [in / GROUP, out]."""
    columns = weight.detach().float().T
    groups = columns.unflatten(0, (-1, GROUP))
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).to(weight.dtype)
    zero = (-low / scale.float()).round().clamp(0, 15)
    spread = functools.partial(torch.repeat_interleave, repeats=GROUP, dim=0)
    return (columns / spread(scale.float()) + spread(zero)).round().clamp(0, 15).int(), scale, zero.int()


def _packed(digits: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of four bits to an int32 along ``dim``."""
    eights = digits.long().unflatten(dim, (-1, 8))
    axis = dim + 1 if dim >= 0 else dim
    total = sum(eights.select(axis, k) << (4 * at) for at, k in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


class GPTQ(nn.Module):
    """The forward of GPTQ's layers in plain torch: columns in groups that lie anywhere (``g_idx``)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(0))
        digits, scales, zeros = _digits(layer.weight[:, order])
        back = order.argsort()
        self.register_buffer("qweight", _packed(digits[back], 0))
        self.register_buffer("qzeros", _packed(zeros, 1))
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", back // GROUP)
        self.register_buffer("wf", torch.arange(0, 32, 4, dtype=torch.int32))

    def weight(self) -> Tensor:
        """[in, out]."""
        zeros = (self.qzeros.unsqueeze(2) >> self.wf) & 15
        digits = (self.qweight.unsqueeze(1) >> self.wf[:, None]) & 15
        return self.scales[self.g_idx] * (digits.flatten(0, 1) - zeros.flatten(1)[self.g_idx])

    def forward(self, x: Tensor) -> Tensor:
        """The product, [..., in] -> [..., out]."""
        return torch.matmul(x, self.weight().to(x.dtype))


class AWQ(nn.Module):
    """The forward of AWQ's GEMM layers in plain torch: eight columns of an int32 in an order of their own."""

    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        digits, scales, zeros = _digits(layer.weight)
        self.register_buffer("qweight", _packed(digits, 1, self.ORDER))
        self.register_buffer("qzeros", _packed(zeros, 1, self.ORDER))
        self.register_buffer("scales", scales)

    def weight(self) -> Tensor:
        """[in, out]."""
        shifts = torch.arange(0, 32, 4)
        back = torch.tensor(self.ORDER).argsort()
        digits, zeros = (((q[:, :, None] >> shifts) & 15)[..., back].flatten(1) for q in (self.qweight, self.qzeros))
        scales, zeros = (t.repeat_interleave(GROUP, dim=0) for t in (self.scales, zeros))
        return (digits - zeros) * scales

    def forward(self, x: Tensor) -> Tensor:
        """The product, [..., in] -> [..., out]."""
        return torch.matmul(x, self.weight().to(x.dtype))


def by_hand(kind: type[GPTQ] | type[AWQ]) -> Callable[[nn.Linear], Made]:
    """A format whose library needs a GPU, in its own layout."""

    def make(layer: nn.Linear) -> Made:
        own = kind(layer)
        return own, own.weight().T.double()

    return make


@functools.cache
def _block_product() -> Any:
    """A reference of the kernel that transformers loads for float8 blocks, under a name as builds of it have."""
    name = "w8a8_block_dynamic_fp8_matmul"
    library = torch.library.Library("_finegrained_fp8_cpu_reference", "DEF")
    library.define(f"{name}(Tensor A, Tensor B, Tensor Bs, int[] block_size, ScalarType? output_dtype=None) -> Tensor")

    def product(A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: Any = None) -> Tensor:
        groups = A.float().unflatten(-1, (-1, block_size[1]))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        x = ((groups / scale).to(B.dtype).float() * scale).flatten(-2)
        return (x @ _spread(B, Bs, block_size).float().T).to(output_dtype or A.dtype)

    library.impl(name, product, "CPU")
    library._register_fake(
        name, lambda A, B, Bs, block_size, output_dtype=None: A.new_empty((*A.shape[:-1], len(B)), dtype=output_dtype)
    )
    return library, torch.ops._finegrained_fp8_cpu_reference.w8a8_block_dynamic_fp8_matmul


def _spread(values: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    for dim, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim)
    return values.double() * scales[: values.shape[0], : values.shape[1]].double()


class _Kernels:
    def matmul(
        self, A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: Any, activation_scale: Any = None
    ) -> Tensor:
        out: Tensor = torch.ops._finegrained_fp8_cpu_reference.w8a8_block_dynamic_fp8_matmul(
            A, B, Bs, block_size, output_dtype
        )
        return out


def float8_blocks(layer: nn.Linear) -> Made:
    """The layer of transformers for DeepSeek-V3's checkpoints, with the kernel replaced by its reference."""
    from transformers.integrations import finegrained_fp8

    _block_product()
    finegrained_fp8.load_finegrained_fp8_kernel = _Kernels
    own = finegrained_fp8.FP8Linear(layer.in_features, layer.out_features, block_size=(GROUP, GROUP))
    weight = layer.weight.detach().float()
    tiles = F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % GROUP))
    tiles = tiles.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = tiles.abs().amax((1, 3)) / 448
    values = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    own.weight.data, own.weight_scale_inv.data, own.bias = values.to(torch.float8_e4m3fn), scale, None
    own.requires_grad_(False)
    return own, _spread(own.weight.data, scale, [GROUP, GROUP])


def compressed_tensors(layer: nn.Linear) -> Made:
    """compressed-tensors' own forward of INT4 in groups: the weight is rounded in every call."""
    from compressed_tensors import quantization as ct

    held = nn.Sequential(layer)
    weights = ct.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)
    scheme = ct.QuantizationScheme(targets=["Linear"], weights=weights)
    config = ct.QuantizationConfig(config_groups={"group_0": scheme}, quantization_status="frozen")
    ct.apply_quantization_config(held, config)
    own: Any = held[0]
    groups = own.weight.detach().unflatten(-1, (-1, GROUP)).abs().amax(-1)
    own.weight_scale.data = (groups / 7.5).to(own.weight_scale.dtype)
    rounded = ct.fake_quantize(own.weight, own.weight_scale, getattr(own, "weight_zero_point", None), weights)
    return own.requires_grad_(False), rounded.detach().double()


def lora(make: Callable[[nn.Linear], Made]) -> Callable[[nn.Linear], Made]:
    """LoRA of peft beside a layer, not merged."""

    def with_lora(layer: nn.Linear) -> Made:
        import peft

        own, weight = make(layer)
        held = nn.Sequential(own)
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"]), held)
        adapter: Any = held[0]
        generator = torch.Generator().manual_seed(0)
        for part in (adapter.lora_A, adapter.lora_B):
            matrix = part["default"].weight
            size = torch.randn(matrix.shape, generator=generator) / matrix.shape[1] ** 0.5
            matrix.data = (0.3 * size).to(layer.weight.dtype)
        a, b = (part["default"].weight.detach().double() for part in (adapter.lora_A, adapter.lora_B))
        return adapter.requires_grad_(False).eval(), weight + 2.0 * b @ a

    return with_lora
