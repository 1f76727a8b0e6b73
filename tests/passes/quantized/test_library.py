"""Products and roundings of libraries: absorbed with the weight that the library itself dequantizes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.codes import Code
from tests.support.quantized import H, Int8, L, N, V, error, exact, inputs, optimized
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

OUT = H * (N + V)


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(L, OUT, bias=False, dtype=dtype).requires_grad_(False)


def absorbed(
    layer: nn.Module, weight: Tensor, rounds: bool | None = False, dtype: torch.dtype = torch.bfloat16, **options
) -> None:
    """The attention over ``layer`` is absorbed, no worse than the original against float64 of ``weight``."""
    fast, after, before = optimized(layer, dtype, verify=True, **options)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED, site.reason
    assert rounds is None or any("no longer rounded" in note for note in site.notes) is rounds
    truth = exact(weight)
    assert error(after, truth) <= 1.05 * error(before, truth) + 1e-6
    assert not torch.equal(after, before)


TORCHAO = {
    "Int8WeightOnlyConfig": ({}, False),
    "Int8WeightOnlyConfig in groups": ({"granularity": 32}, False),
    "Float8WeightOnlyConfig": ({}, False),
    "IntxWeightOnlyConfig": ({"weight_dtype": torch.int4, "granularity": 32}, False),
    "Int8DynamicActivationInt8WeightConfig": ({}, True),
    "Int8DynamicActivationIntxWeightConfig": ({"weight_dtype": torch.int4, "weight_granularity": 32}, True),
}


@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "config",
    usual(TORCHAO, rare=("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")),
)
def test_torchao(config, dtype):
    quantization = pytest.importorskip("torchao.quantization")
    settings, rounds = TORCHAO[config]
    given = {k: quantization.PerGroup(v) if "granularity" in k else v for k, v in settings.items()}
    layer = nn.Sequential(linear(dtype))
    quantization.quantize_(layer, getattr(quantization, config.split()[0])(**given))
    absorbed(layer, layer[0].weight.dequantize(), rounds, dtype)


@pytest.mark.singly
def test_weights_loaded_into_torchaos_tensors_are_used():
    """torchao's ``copy_`` counts as a write to the tensor subclass and not to the tensors inside."""
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    layer, other = nn.Sequential(linear()), nn.Sequential(linear())
    other[0].weight.mul_(torch.randn(OUT, 1))
    for each in (layer, other):
        quantization.quantize_(each, config)
    fast, first, _ = optimized(layer, dequantize="once")
    assert {p.name: p.changes for p in fast.mla_report.passes}["dequantize"] == 2
    layer.load_state_dict(other.state_dict())
    with torch.no_grad():
        after = fast(*inputs())
    assert not torch.equal(after, first)
    assert error(after, exact(other[0].weight.dequantize())) < 0.02


@pytest.mark.singly
@pytest.mark.parametrize("dequantize", ["once", "step"])
@pytest.mark.parametrize("kind", ["nf4", "fp4", *also("combination", "nf4 of float32 scales")])
def test_bitsandbytes_four_bit(kind, dequantize):
    library = pytest.importorskip("bitsandbytes")
    dense = linear()
    layer = library.nn.Linear4bit(L, OUT, bias=False, compute_dtype=torch.bfloat16)
    layer.weight = library.nn.Params4bit(
        dense.weight.data, requires_grad=False, quant_type=kind[:3], compress_statistics="float32" not in kind
    )
    layer = layer.to("cpu")
    weight = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    absorbed(layer, weight, dequantize=dequantize)


@pytest.mark.parametrize("called_before", [True, *also("combination", False)])
def test_bitsandbytes_eight_bit(called_before):
    """``forward`` writes ``weight.data`` to where it lies, and reads the weight from an object that is no module."""
    library = pytest.importorskip("bitsandbytes")
    dense = linear()
    layer = library.nn.Linear8bitLt(L, OUT, bias=False, has_fp16_weights=False)
    layer.weight = library.nn.Int8Params(dense.weight.data, requires_grad=False, has_fp16_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = layer.to("cpu")
        if called_before:
            layer(torch.randn(1, L, dtype=torch.bfloat16))
        stored = layer.weight.CB if layer.weight.CB is not None else layer.state.CB
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        weight = stored.double() * scales.double()[:, None] / 127
        absorbed(layer, weight, None)  # which of its products it takes depends on the machine
    assert layer.weight.data_ptr() == layer.state.CB.data_ptr()


def test_weight_only_kernel_of_torch():
    torch.manual_seed(0)

    def product(own, x):
        out = torch._weight_int8pack_mm(x.flatten(0, 1), own.weight, own.scale.to(x.dtype))
        return out.unflatten(0, x.shape[:2])

    layer = Int8(product)
    absorbed(layer, layer.dense())


def test_packed_kernel_is_read_by_unit_vectors():
    """int4 weights packed for this machine: only the kernel knows the format, and tells it row by row."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (OUT, L), dtype=torch.int32)
    scales_and_zeros = torch.randn(L // 32, OUT, 2).mul(0.05).to(torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("packed", packed)
            self.register_buffer("scales_and_zeros", scales_and_zeros)

        def forward(self, x):
            rows = x.flatten(0, 1)
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, 32, self.scales_and_zeros)
            return out.unflatten(0, x.shape[:2])

    units = torch.eye(L, dtype=torch.bfloat16)
    weight = torch.ops.aten._weight_int4pack_mm_for_cpu(units, packed, 32, scales_and_zeros).T
    absorbed(Layer(), weight)


def dynamic_float8(A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype=None) -> Tensor:
    rows, columns = block_size
    groups = A.float().unflatten(-1, (-1, columns))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    x = ((groups / scale).to(B.dtype).float() * scale).flatten(-2)
    weight = B.float() * Bs.float().repeat_interleave(rows, 0)[: len(B)].repeat_interleave(columns, 1)
    return (x @ weight.T).to(output_dtype or A.dtype)


@pytest.fixture(scope="module")
def block_product():
    """A reference of the kernel that transformers loads for float8 blocks, under a name as builds of it have."""
    name = "w8a8_block_dynamic_fp8_matmul"
    library = torch.library.Library("_finegrained_fp8_cpu_0a1b2c3", "DEF")
    library.define(f"{name}(Tensor A, Tensor B, Tensor Bs, int[] block_size, ScalarType? output_dtype=None) -> Tensor")
    library.impl(name, dynamic_float8, "CPU")
    library._register_fake(
        name, lambda A, B, Bs, block_size, output_dtype=None: A.new_empty((*A.shape[:-1], len(B)), dtype=output_dtype)
    )
    yield torch.ops._finegrained_fp8_cpu_0a1b2c3.w8a8_block_dynamic_fp8_matmul
    library._destroy()


class BlockFloat8(nn.Module):
    """DeepSeek-V3's format: float8 values and a scale for each block, the last block of rows cut."""

    def __init__(self, product, block: int = 32, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.product, self.block = product, block
        weight = linear(torch.float32).weight
        tiles = F.pad(weight, (0, 0, 0, -OUT % block)).unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = tiles.abs().amax((1, 3)) / 448
        if kind == torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        full = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        self.register_buffer("weight", full[:OUT].to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.to(kind))

    def forward(self, x):
        return self.product(x, self.weight, self.scale, [self.block, self.block], x.dtype)

    def dense(self) -> Tensor:
        scale = self.scale.double().repeat_interleave(self.block, 0)[:OUT].repeat_interleave(self.block, 1)
        return self.weight.double() * scale


@pytest.mark.singly
@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dequantize", ["once", "step", *also("combination", "auto")])
def test_float8_blocks(block_product, dequantize, kind):
    layer = BlockFloat8(block_product, kind=kind)
    absorbed(layer, layer.dense(), rounds=True, dequantize=dequantize)


def test_float8_blocks_stay_exact(block_product):
    fast, after, before = optimized(BlockFloat8(block_product), quantized="exact")
    assert fast.mla_report.sites[0].code == Code.QUANTIZED_ROWS
    assert torch.equal(after, before)


def test_scales_of_other_blocks_are_no_silent_numbers(block_product):
    layer = BlockFloat8(block_product)
    layer.block = 16
    with pytest.raises(Exception, match=r"expected|must match"):
        optimized(layer)


def test_the_layer_of_transformers(block_product, monkeypatch):
    """transformers' own module for these checkpoints, with the kernel replaced by its reference."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")

    class Kernels:
        def matmul(self, A, B, Bs, block_size, output_dtype=None, activation_scale=None):
            return block_product(A, B, Bs, block_size, output_dtype)

    source = BlockFloat8(block_product)
    layer = integration.FP8Linear(L, OUT, block_size=(32, 32))
    layer.weight.data, layer.weight_scale_inv.data, layer.bias = source.weight, source.scale, None
    monkeypatch.setattr(integration, "load_finegrained_fp8_kernel", Kernels)
    absorbed(layer, source.dense(), rounds=True)
