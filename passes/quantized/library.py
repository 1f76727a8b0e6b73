"""Operators of libraries that quantize, by their qualified names: nothing of the libraries is imported.

Three tables: products whose weight is stored in a format of its own, dequantized by the library itself
(:data:`PRODUCTS`); operators that round rows by scales or that compute with rounded rows (:data:`ROWS`); and those that
choose scales, which rules of the second read (``_CHOICES``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.errors import InputError
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import args_of, is_tensor, shape, val
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.quantized.registry import Products, QuantizedLinear, named_arguments, schema_name
from mla_compile.passes.quantized.rows import RowTracker, Scale, Scaled, block, covers, short

aten, ops = torch.ops.aten, torch.ops


# Weights, dequantized by the library that made them.


def _bitsandbytes_4bit(
    *, B: Any, shapeB: Any, absmax: Any, blocksize: int, quant_type: str, bias: Any,
    absmax_8bit: Any, absmax_code: Any, absmax_offset: Any, **_: Any,
) -> Any:  # fmt: skip
    if absmax_8bit is not None:  # the scales are quantized themselves, in blocks of 256 (QLoRA, section 3)
        scales = ops.bitsandbytes.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
    return ops.bitsandbytes.dequantize_4bit(B, absmax, blocksize, quant_type, list(shapeB), torch.float32), bias


def _bitsandbytes_8bit(*, CB: Any, SCB: Any, bias: Any, **_: Any) -> Any:
    return ops.bitsandbytes.int8_vectorwise_dequant(CB, SCB), bias


def _weight_int8(*, mat2: Any, scales: Any, **_: Any) -> Any:
    return mat2.float() * scales.float()[:, None]


def _float8_blocks(*, B: Any, Bs: Any, block_size: Any = None, **_: Any) -> Any:
    """float8 values [out, in] and a scale for each block (DeepSeek-V3, section 3.3), 32 columns of a row, or all."""
    scales = (Bs.view(torch.float8_e8m0fnu) if Bs.dtype == torch.uint8 else Bs).float()
    if scales.numel() == 1:
        return B.float() * scales.reshape(())
    size = list(block_size or (1, 32))
    blocks = [-(-own // each) for own, each in zip(B.shape, size, strict=True)]
    if list(scales.shape) != blocks:
        raise InputError(
            f"scales {list(scales.shape)} of a weight {list(B.shape)} in blocks of {size}, expected {blocks}"
        )
    for dim, each in enumerate(size):
        scales = scales.repeat_interleave(each, dim)
    return B.float() * scales[: B.shape[0], : B.shape[1]]


PRODUCTS = Products(
    {
        "aten::_weight_int8pack_mm": QuantizedLinear("self", _weight_int8),
        # Packed for one kind of machine: the kernel is the only one who can read it. Its sums have one term each here.
        "aten::_weight_int4pack_mm": QuantizedLinear("self", None),
        "aten::_weight_int4pack_mm_for_cpu": QuantizedLinear("self", None),
        "aten::_weight_int4pack_mm_with_scales_and_zeros": QuantizedLinear("self", None),
        "aten::_dyn_quant_matmul_4bit": QuantizedLinear("inp", None, rounds=True),
        "bitsandbytes::gemm_4bit": QuantizedLinear("A", _bitsandbytes_4bit),
        # Repacked for a CPU with instructions for bfloat16; on a GPU it is for one row, which no cache of rows is.
        "bitsandbytes::gemv_4bit": QuantizedLinear("A", None),
        "bitsandbytes::int8_mixed_scaled_mm": QuantizedLinear("A", _bitsandbytes_8bit, rounds=True),
        # The kernels that transformers loads for checkpoints in float8 blocks; the namespace ends in a build's hash.
        "_finegrained_fp8_*::w8a8_block_dynamic_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::w8a8_block_static_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::w8a8_tensor_dynamic_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::mxfp_dynamic_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
    }
)
"""Products that need no registration. ``int8_mixed_scaled_mm`` returns a tuple, of which the first is the product."""


# Rows, rounded by scales. ``value = rows / scale + zero`` in all of these.


def _chosen(scale: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """The operator that chose a scale, and its arguments, where it is known to fit the rows to the scale."""
    whole = args_of(scale)[0] if getattr(scale.target, "__name__", "") == "getitem" else scale
    if not isinstance(whole, fx.Node) or schema_name(whole) not in _CHOICES:
        return None
    return whole, named_arguments(whole)


_CHOICES = {
    "torchao::choose_qparams_affine": "input",
    "torchao::choose_scale_float8": "tensor",
    "quantized_decomposed::choose_qparams_per_token": "input",
    "quantized_decomposed::choose_qparams_per_token_asymmetric": "input",
    "quantized_decomposed::_choose_qparams_per_token_asymmetric_impl": "input",
    "quantized_decomposed::choose_qparams": "input",
    "quantized_decomposed::choose_qparams_symmetric": "input",
}
"""Operators that choose a scale and a zero point for rows, and the argument that holds the rows."""


def _quantized(tracker: RowTracker, node: fx.Node, x: Any, scale: Any, zero: Any, dropped: str) -> Scaled | None:
    """``x / scale + zero``, rounded; the scale was chosen for these rows, or is a constant."""
    if not is_tensor(x) or tracker.is_weight(x) or tracker.of(x) is not None or not isinstance(scale, fx.Node):
        return None
    if not covers(_trailing(scale, x), shape(x)):
        return None
    found = _chosen(scale)
    if found is None:
        return None
    whole, told = found
    if told[_CHOICES[schema_name(whole)]] is not x:
        return None
    # Symmetric ones have a zero point of zeros. It is known again all the same, where it is given back.
    symmetric = told.get("mapping_type") == "SYMMETRIC" or "symmetric" in schema_name(whole).split("_")[-1:]
    length = block(scale, x)
    if length is None:
        return None
    scales = (Scale(scale, length, -1),)
    return Scaled(x, scales, whole=True, dropped=dropped, zero=None if symmetric else zero)


def _trailing(scale: fx.Node, x: fx.Node) -> tuple[Any, ...]:
    """The shape of a scale whose axes of size one at the end may have been left out."""
    own = shape(scale)
    return (*own, *([1] * (len(shape(x)) - len(own)))) if len(own) < len(shape(x)) else own


def _dequantized(tracker: RowTracker, node: fx.Node, q: Any, scale: Any, zero: Any) -> Scaled | None:
    """``(q - zero) * scale``: the rows, where both are those that quantized them."""
    x = tracker.of(q)
    if x is None or len(x.scales) != 1 or x.scales[0].exponent != -1 or x.scales[0].root is not scale:
        return None
    return replace(x, scales=(), zero=None) if x.zero is None or x.zero is zero else None


def _quantize_affine(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    return _quantized(tracker, node, told["input"], told["scale"], told["zero_point"], short(told["output_dtype"]))


def _dequantize_affine(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    return _dequantized(tracker, node, told["input"], told["scale"], told["zero_point"])


def _quantize_float8(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    return _quantized(tracker, node, told["tensor"], told["scale"], None, short(told["float8_dtype"]))


def _dequantize_float8(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    return _dequantized(tracker, node, told["tensor"], told["scale"], None)


def _quantize_decomposed(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    scale, zero = told.get("scales", told.get("scale")), told.get("zero_points", told.get("zero_point"))
    return _quantized(tracker, node, told["input"], scale, zero, short(told["dtype"]))


def _dequantize_decomposed(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    scale, zero = told.get("scales", told.get("scale")), told.get("zero_points", told.get("zero_point"))
    return _dequantized(tracker, node, told["input"], scale, zero)


def _fake_quantized(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x: Any = args_of(node)[0]
    if not is_tensor(x) or tracker.is_weight(x):
        return None
    steps = int(named_arguments(node)["quant_max"]) - int(named_arguments(node)["quant_min"]) + 1  # type: ignore[call-overload]
    return Scaled(x, (), dropped=f"{steps} steps")


def _bitsandbytes_rows(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """The first of three results: whole numbers up to 127, by the largest of each row, which is the second."""
    whole, at = args_of(node)
    told: Any = named_arguments(whole)
    x, stats = told["A"], next((n for n in whole.users if args_of(n)[1:] == (1,)), None)
    # With a threshold, columns are set to zero here and computed elsewhere.
    if at != 0 or told["threshold"] or stats is None or tracker.is_weight(x):
        return None
    length = block(stats, x)
    if length is None:
        return None
    builder = tracker.build(node)
    scales = (Scale(stats, length, -1),)
    return Scaled(builder.call(aten.mul.Tensor, x, 127.0), scales, top=127.0, whole=True, dropped="int8")


def _bitsandbytes_int8(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    x, stats = tracker.of(told["A"]), told["row_stats"]
    # Of a weight that has its scales: int8 values times the largest number of each row over 127.
    if x is None or not (tracker.is_weight(told["B"]) and tracker.is_weight(told["col_stats"])):
        return None
    builder = tracker.build(node)
    weight = builder.call(ops.bitsandbytes.int8_vectorwise_dequant.default, told["B"], told["col_stats"])
    found = _with_row_scale(tracker, tracker.product(node, x, weight, True), stats, x, 1 / 127, node)
    return _biased(tracker, node, found, told["bias"])


def _int_scaled(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    x = tracker.of(told["a"])
    if x is None or not tracker.is_weight(told["b"]):
        return None
    found = tracker.product(node, x, told["b"], False)
    return found and tracker.multiplied(node, found, told["scales1"], aten.mul)


def _int_matmul(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told: Any = named_arguments(node)
    x = tracker.of(told["a"])
    found = tracker.product(node, x, told["b"], False) if x is not None and tracker.is_weight(told["b"]) else None
    return found and replace(found, whole=True)


def _scaled_mm(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """``(a * scale_a) @ (b * scale_b) + bias``, with a scale for the tensor, a row, or a block of 128."""
    told: Any = named_arguments(node)
    x, b, scale_a, scale_b = tracker.of(told["self"]), told["mat2"], told["scale_a"], told["scale_b"]
    if x is None or told["scale_result"] is not None or not (tracker.is_weight(b) and tracker.is_weight(scale_b)):
        return None
    weight = _scaled_weight(tracker, node, b, scale_b)
    if weight is None:
        return None
    builder = tracker.build(node)
    scaled = _with_row_scale(tracker, x, scale_a, x, 1.0, node)
    if scaled is None or scaled.scales:
        return None
    found = tracker.product(
        node, replace(scaled, plain=builder.cast(scaled.plain, wide(val(x.plain).dtype))), weight, False
    )
    return _biased(tracker, node, found, told["bias"])


def _scaled_weight(tracker: RowTracker, node: fx.Node, b: fx.Node, scale: fx.Node) -> fx.Node | None:
    """``b`` [in, out] times its scales: one, one for each column, or one for each block of 128 by 128 (or by 1)."""
    builder = tracker.build(node)
    rows, columns = shape(b)
    own = shape(scale)
    if val(scale).dtype != torch.float32:  # powers of two, swizzled for the tensor cores: another format
        return None
    if math.prod(own) != 1 and own != (1, columns):
        sizes = [
            size // s if isinstance(size, int) and size % s == 0 else 0
            for size, s in zip((rows, columns), own, strict=False)
        ]
        if len(own) != 2 or sizes[0] != 128 or sizes[1] not in (1, 128):
            return None
        for dim, size in enumerate(sizes):
            scale = builder.call(aten.repeat_interleave.self_int, scale, size, dim) if size > 1 else scale
    return builder.call(aten.mul.Tensor, builder.cast(b, torch.float32), scale)


def _with_row_scale(
    tracker: RowTracker, x: Scaled | None, by: fx.Node, rows: Scaled, factor: float, node: fx.Node
) -> Scaled | None:
    """``x`` times the scale ``by`` of ``rows``, whatever axes the operator takes it with."""
    if x is None:
        return None
    if tracker.is_weight(by):
        return tracker.multiplied(node, x, by, aten.mul) if math.prod(shape(by)) == 1 else None
    (own, *others) = rows.scales
    found = tracker.scale_of(by, by)
    if others or found is None or found[0].root is not own.root:
        return None
    if not same(math.prod(shape(by)) * own.block, math.prod(shape(rows.plain))):
        return None
    scaled = x.times(Scale(own.root, x.scales[0].block, found[0].exponent)) if x.scales else None
    return scaled and tracker.multiplied(node, scaled, found[1] * factor, aten.mul)


def _biased(tracker: RowTracker, node: fx.Node, x: Scaled | None, bias: Any) -> Scaled | None:
    if x is None or bias is None:
        return x
    if x.scales or not tracker.is_weight(bias):
        return None
    return replace(x, plain=tracker.build(node).call(aten.add.Tensor, x.plain, bias))


RowRule = Callable[[RowTracker, fx.Node], "Scaled | None"]
_DECOMPOSED = ("per_tensor", "per_token")
ROWS: dict[str, RowRule] = {
    "torchao::quantize_affine": _quantize_affine,
    "torchao::dequantize_affine": _dequantize_affine,
    "torchao::quantize_affine_float8_non_decomposed": _quantize_float8,
    "torchao::dequantize_affine_float8_non_decomposed": _dequantize_float8,
    "torchao::int_scaled_matmul": _int_scaled,
    "torchao::int_matmul": _int_matmul,
    **{f"quantized_decomposed::quantize_{kind}": _quantize_decomposed for kind in _DECOMPOSED},
    **{f"quantized_decomposed::dequantize_{kind}": _dequantize_decomposed for kind in _DECOMPOSED},
    "aten::fake_quantize_per_tensor_affine": _fake_quantized,
    "aten::_scaled_mm": _scaled_mm,
    "bitsandbytes::int8_scaled_mm": _bitsandbytes_int8,
}
"""What operators make of rounded rows, by name."""

MEMBERS: dict[str, RowRule] = {"bitsandbytes::int8_vectorwise_quant": _bitsandbytes_rows}
"""The same for operators with several results, asked of each result."""
