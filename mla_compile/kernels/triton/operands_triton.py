"""Preparation of rows and queries before their products in attention (decode_triton.py): dtypes, scales, ranges."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_dot(x, DTYPE: tl.constexpr):
    """A loaded tile in the dtype of the products. Bits of e4m3: sign, 4 of exponent (bias 7), 3 of mantissa.

    Shifted by 7, exponent and mantissa are in the position of float16, whose bias is 8 larger. So the result is the
    value times 2^-8, subnormals included. NaN is 0x7f.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        half = tl.where((bits & 0x7F) == 0x7F, 0x7FFF, half).to(tl.uint16)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def times_groups(x, scales, GROUP: tl.constexpr):
    """Rows x [N,L] in float32, each group of columns times its scale; scales [N,L/GROUP].

    The sum runs over a single term. Triton searches the producers of a product's operands for the narrowest dtype,
    stops only at reductions, and would otherwise find float8. Rows would then be loaded in an order that ldmatrix
    lacks.
    """
    groups = to_dot(x, tl.float32).reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    return tl.sum((groups * scales[:, :, None]).reshape(1, x.shape[0], x.shape[1]), 0)


@triton.jit
def power_of_two(amax):
    """``(down, up)``: powers of two with amax * down in [2^13, 2^14) and down * up = 1; NaN and infinity are kept."""
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 14), 254)
    down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return down, up
