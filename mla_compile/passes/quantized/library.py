"""Operators of quantization libraries, by their qualified names, so that no library is imported.

:data:`PRODUCTS` lists products with a quantized weight, and how to dequantize the weight. :data:`ROWS` and
:data:`MEMBERS` list operators that round rows with scales or compute with rounded rows. ``_CHOICES`` lists operators
that choose scales. The rules of :data:`ROWS` read this list.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.errors import InputError
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import args_of, is_tensor, packet, shape, val
from mla_compile.passes.ir.schema import named_arguments, schema_name
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.quantized.registry import ProductTable, QuantizedLinear
from mla_compile.passes.quantized.rows import FINE, RowTracker, Scaled, short
from mla_compile.passes.quantized.scales import TINY, Scale, block, covers

aten, ops = torch.ops.aten, torch.ops


# Functions that dequantize weights. They call the library's own operators if there are any.


def _bitsandbytes_4bit(
    *, B: Tensor, shapeB: Sequence[int], absmax: Tensor, blocksize: int, quant_type: str, bias: Tensor | None,
    absmax_8bit: Tensor | None, absmax_code: Tensor | None, absmax_offset: Tensor | None, **_: object,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if absmax_8bit is not None:  # the scales are quantized themselves, in blocks of 256 (QLoRA, section 3)
        scales = ops.bitsandbytes.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
    return ops.bitsandbytes.dequantize_4bit(B, absmax, blocksize, quant_type, list(shapeB), torch.float32), bias


def _bitsandbytes_8bit(*, CB: Tensor, SCB: Tensor, bias: Tensor | None, **_: object) -> tuple[Tensor, Tensor | None]:
    return ops.bitsandbytes.int8_vectorwise_dequant(CB, SCB), bias


def _weight_int8(*, mat2: Tensor, scales: Tensor, **_: object) -> Tensor:
    return mat2.float() * scales.float()[:, None]


def _quanto(*, B: Tensor, scales: Tensor, **_: object) -> Tensor:
    """Dequantize int8 or float8 values [out, in], with one scale per output [out, 1] or a single scale."""
    return B.float() * scales.float()


def _float8_blocks(*, B: Tensor, Bs: Tensor, block_size: Sequence[int] | None = None, **_: object) -> Tensor:
    """Dequantize float8 values [out, in].

    There is one scale per block (DeepSeek-V3, section 3.3), one per 32 columns, or a single scale.
    """
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


PRODUCTS = ProductTable(
    {
        "aten::_weight_int8pack_mm": QuantizedLinear("self", _weight_int8),
        # These weights are packed for one kind of machine, and only the kernel can read them. For unit vectors, the
        # kernel returns the weights, because each of its sums has a single term.
        "aten::_weight_int4pack_mm": QuantizedLinear("self", None),
        "aten::_weight_int4pack_mm_for_cpu": QuantizedLinear("self", None),
        "aten::_weight_int4pack_mm_with_scales_and_zeros": QuantizedLinear("self", None),
        "aten::_dyn_quant_matmul_4bit": QuantizedLinear("inp", None, rounds=True),
        "bitsandbytes::gemm_4bit": QuantizedLinear("A", _bitsandbytes_4bit),
        # On a CPU with bfloat16 instructions the weight is repacked, and only the kernel can read it. On a GPU the
        # operator takes a single row, so it never multiplies the rows of a cache.
        "bitsandbytes::gemv_4bit": QuantizedLinear("A", None),
        "bitsandbytes::int8_mixed_scaled_mm": QuantizedLinear("A", _bitsandbytes_8bit, rounds=True),
        "quanto::qbytes_mm": QuantizedLinear("A", _quanto),
        # Kernels that transformers loads for checkpoints in float8 blocks; the namespace ends in a build's hash.
        "_finegrained_fp8_*::w8a8_block_dynamic_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::w8a8_block_static_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::w8a8_tensor_dynamic_fp8_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
        "_finegrained_fp8_*::mxfp_dynamic_matmul": QuantizedLinear("A", _float8_blocks, rounds=True),
    }
)
"""Products that need no registration. ``int8_mixed_scaled_mm`` returns a tuple whose first member is the product."""


# Operators that choose scales, that quantize rows (``value = rows / scale + zero``) and that compute with such values


@dataclass(frozen=True)
class _Choice:
    """An operator that chooses a scale and perhaps a zero point. ``rows`` and ``dtype`` are argument names.

    ``symmetric``: whether the scale is chosen for a range around zero; None if the argument ``mapping_type`` decides.
    """

    rows: str
    dtype: str
    symmetric: bool | None


_CHOICES = {
    "torchao::choose_qparams_affine": _Choice("input", "target_dtype", None),
    "torchao::choose_scale_float8": _Choice("tensor", "float8_dtype", symmetric=True),
    "quantized_decomposed::choose_qparams_per_token": _Choice("input", "dtype", symmetric=True),
    "quantized_decomposed::choose_qparams_per_token_asymmetric": _Choice("input", "dtype", symmetric=False),
    "quantized_decomposed::_choose_qparams_per_token_asymmetric_impl": _Choice("input", "dtype", symmetric=False),
    "quantized_decomposed::choose_qparams": _Choice("input", "dtype", symmetric=False),
    "quantized_decomposed::choose_qparams_symmetric": _Choice("input", "dtype", symmetric=True),
}


@dataclass(frozen=True)
class _Names:
    """An operator's argument names for rows, scale, zero point and the dtype of rounded rows."""

    x: str
    scale: str
    zero: str = ""
    dtype: str = ""


_QUANTIZE = {
    "torchao::quantize_affine": _Names("input", "scale", "zero_point", "output_dtype"),
    "torchao::quantize_affine_float8_non_decomposed": _Names("tensor", "scale", dtype="float8_dtype"),
    "quantized_decomposed::quantize_per_token": _Names("input", "scales", "zero_points", "dtype"),
    "quantized_decomposed::quantize_per_tensor": _Names("input", "scale", "zero_point", "dtype"),
}
_DEQUANTIZE = {
    "torchao::dequantize_affine": _Names("input", "scale", "zero_point"),
    "torchao::dequantize_affine_float8_non_decomposed": _Names("tensor", "scale"),
    "quantized_decomposed::dequantize_per_token": _Names("input", "scales", "zero_points"),
    "quantized_decomposed::dequantize_per_tensor": _Names("input", "scale", "zero_point"),
}


def _quantized(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe ``x / scale + zero``, rounded, if the scale was chosen for exactly these rows."""
    names, told = _QUANTIZE[schema_name(node)], named_arguments(node)
    x, scale = told[names.x], told[names.scale]
    if not is_tensor(x) or tracker.is_weight(x) or not is_tensor(scale) or is_tensor(told.get("quant_min")):
        return None
    by = args_of(scale)[0] if _member(scale, 0) else scale
    choice = _CHOICES.get(schema_name(by))
    length = block(scale, x)
    if choice is None or length is None or not covers(_as_wide(scale, x), shape(x)):
        return None
    chosen = named_arguments(by)
    if chosen[choice.rows] is not x or chosen.get("block_size") != told.get("block_size", chosen.get("block_size")):
        return None
    low, high = _range(told, told[names.dtype])
    least, most = _range(chosen, chosen[choice.dtype])
    # The operator must cover the range for which the scale was chosen, the range must have enough steps, and the
    # scale must fit all ordinary rows.
    if low > least or high < most or most - least < 2 * FINE or not _fits_all(chosen, most):
        return None
    # The zero point must have been chosen together with the scale. For a range around zero, the zero point is zero.
    zero = told[names.zero] if names.zero else None
    symmetric = str(chosen["mapping_type"]).startswith("SYMMETRIC") if choice.symmetric is None else choice.symmetric
    centred = symmetric and abs(least + most) <= 1
    if not (centred if zero is None else _member(zero, 1) and args_of(zero)[0] is by):
        return None
    dropped, kept = short(told[names.dtype]), None if centred else zero
    return Scaled(x, (Scale(scale, length, -1),), low, high, whole=True, dropped=dropped, zero=kept)


def _member(node: Any, index: int) -> bool:
    return packet(node) is operator.getitem and args_of(node)[1] == index


def _fits_all(chosen: dict[str, Any], most: float) -> bool:
    """Whether the rows alone determine a scale. Bounds below all ordinary rows (:data:`TINY`) are ignored."""
    least = max((chosen.get("eps") or 0.0) * most, chosen.get("hp_value_lb") or 0.0)
    return least <= TINY and chosen.get("hp_value_ub") is None


def _range(told: dict[str, Any], dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds of the values to which an operator rounds; by default, the dtype's bounds."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low, high = told.get("quant_min"), told.get("quant_max")
    return (info.min if low is None else float(low)), (info.max if high is None else float(high))


def _as_wide(scale: fx.Node, x: fx.Node) -> tuple[Size, ...]:
    """Return the shape of a scale, padded to the rank of ``x`` with trailing axes of size one."""
    own = shape(scale)
    return (*own, *([1] * (len(shape(x)) - len(own))))


def _dequantized(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe ``(q - zero) * scale`` as the rows, if the rows were quantized with this scale and this zero point."""
    names, told = _DEQUANTIZE[schema_name(node)], named_arguments(node)
    x, scale = tracker.of(told[names.x]), told[names.scale]
    if x is None or len(x.scales) != 1 or x.scales[0].exponent != -1 or x.scales[0].root is not scale:
        return None
    zero = told[names.zero] if names.zero else None
    if x.zero is None:  # the zero point is zero, whatever node holds it
        same_zero = zero is None or (_member(zero, 1) and _member(scale, 0) and args_of(zero)[0] is args_of(scale)[0])
    else:
        same_zero = x.zero is zero
    return replace(x, scales=(), zero=None) if same_zero else None


def _fake_quantized(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told = named_arguments(node)
    x, steps = told["self"], told["quant_max"] - told["quant_min"] + 1
    # A fixed scale is a number or a calibrated weight. A computed scale would differ from call to call.
    calibrated = all(not isinstance(told[n], fx.Node) or tracker.is_weight(told[n]) for n in ("scale", "zero_point"))
    known = is_tensor(x) and not tracker.is_weight(x) and calibrated and steps > 2 * FINE
    return Scaled(x, (), dropped=f"{steps} steps") if known else None


def _bitsandbytes_rows(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe the first result: rows as whole numbers up to 127. The second result is the scale."""
    whole, at = args_of(node)
    told = named_arguments(whole)
    x, stats = told["A"], next((n for n in whole.users if args_of(n)[1:] == (1,)), None)
    # If there is a threshold, some columns are set to zero, and another operator computes them.
    if at != 0 or told["threshold"] or stats is None or tracker.is_weight(x):
        return None
    length = block(stats, x)
    if length is None:
        return None
    builder = tracker.build(node)
    scales = (Scale(stats, length, -1),)
    return Scaled(builder.call(aten.mul.Tensor, x, 127.0), scales, low=-127.0, high=127.0, whole=True, dropped="int8")


def _bitsandbytes_int8(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told = named_arguments(node)
    x, stats = tracker.of(told["A"]), told["row_stats"]
    # The weight is int8 values times the largest number of each weight row, divided by 127.
    if x is None or not (tracker.is_weight(told["B"]) and tracker.is_weight(told["col_stats"])):
        return None
    builder = tracker.build(node)
    weight = builder.call(ops.bitsandbytes.int8_vectorwise_dequant.default, told["B"], told["col_stats"])
    found = _with_row_scale(tracker, tracker.product(node, x, weight, transposed=True), stats, x, 1 / 127, node)
    return _biased(tracker, node, found, told["bias"])


def _int_scaled(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told = named_arguments(node)
    x = tracker.of(told["a"])
    if x is None or not tracker.is_weight(told["b"]):
        return None
    found = tracker.product(node, x, told["b"], transposed=False)
    return found and tracker.multiplied(node, found, told["scales1"], aten.mul)


def _int_matmul(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    told = named_arguments(node)
    x = tracker.of(told["a"])
    found = (
        tracker.product(node, x, told["b"], transposed=False)
        if x is not None and tracker.is_weight(told["b"])
        else None
    )
    return found and replace(found, whole=True)


def _scaled_mm(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe ``(a * scale_a) @ (b * scale_b) + bias``, with one scale per tensor, per row, or per block of 128."""
    return _scaled_product(tracker, node, named_arguments(node))


def _scaled_mm_v2(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe ``_scaled_mm`` with lists of scales; None unless scales are per tensor or per row (recipes 0, 1)."""
    told = named_arguments(node)
    if told["contraction_dim"] or any([*told[f"recipe_{side}"]] not in ([0], [1]) for side in "ab"):
        return None
    return _scaled_product(tracker, node, {**told, **{f"scale_{side}": told[f"scale_{side}"][0] for side in "ab"}})


def _scaled_product(tracker: RowTracker, node: fx.Node, told: dict[str, Any]) -> Scaled | None:
    x, b, scale_a, scale_b = tracker.of(told["self"]), told["mat2"], told["scale_a"], told["scale_b"]
    if x is None or told.get("scale_result") is not None or not (tracker.is_weight(b) and tracker.is_weight(scale_b)):
        return None
    weight = _scaled_weight(tracker, node, b, scale_b)
    if weight is None:
        return None
    builder = tracker.build(node)
    scaled = _with_row_scale(tracker, x, scale_a, x, 1.0, node)
    if scaled is None or scaled.scales:
        return None
    found = tracker.product(
        node, replace(scaled, plain=builder.cast(scaled.plain, wide(val(x.plain).dtype))), weight, transposed=False
    )
    return _biased(tracker, node, found, told["bias"])


def _scaled_weight(tracker: RowTracker, node: fx.Node, b: fx.Node, scale: fx.Node) -> fx.Node | None:
    """Return ``b`` [in, out] times one scale, one scale per column, or one per block of 128 by 128 or 128 by 1."""
    builder = tracker.build(node)
    rows, columns = shape(b)
    own = shape(scale)
    if val(scale).dtype != torch.float32:  # powers of two, swizzled for tensor cores, are another format
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
    """Multiply ``x`` by ``by``, the scale of ``rows``. ``by`` may have any shape that the operator expects."""
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


def _biased(tracker: RowTracker, node: fx.Node, x: Scaled | None, bias: object) -> Scaled | None:
    if x is None or bias is None:
        return x
    if x.scales or not tracker.is_weight(bias):
        return None
    return replace(x, plain=tracker.build(node).call(aten.add.Tensor, x.plain, bias))


RowRule = Callable[[RowTracker, fx.Node], "Scaled | None"]
ROWS: dict[str, RowRule] = {
    **dict.fromkeys(_QUANTIZE, _quantized),
    **dict.fromkeys(_DEQUANTIZE, _dequantized),
    "torchao::int_scaled_matmul": _int_scaled,
    "torchao::int_matmul": _int_matmul,
    "aten::fake_quantize_per_tensor_affine": _fake_quantized,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm_v2": _scaled_mm_v2,
    "bitsandbytes::int8_scaled_mm": _bitsandbytes_int8,
}
"""Rules for operators on rounded rows, by name."""

MEMBERS: dict[str, RowRule] = {"bitsandbytes::int8_vectorwise_quant": _bitsandbytes_rows}
"""Rules for one result of an operator with several results."""
