"""What attention (decode_triton.py) does to rows and queries before they are multiplied: dtypes, scales, ranges."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_dot(x, DTYPE: tl.constexpr):
    """A loaded tile in the dtype of the products. Bits of e4m3: sign, 4 of exponent (bias 7), 3 of mantissa.

    Shifted by 7, exponent and mantissa lie where float16 has them, its bias being 8 larger: the value, times 2^-8,
    subnormals included. NaN is 0x7f.
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

    The sum is over one term. Behind the operands of a product Triton looks for the narrowest dtype, through all but
    reductions, and finds float8; then they would be loaded in an order that ldmatrix does not have.
    """
    groups = to_dot(x, tl.float32).reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    return tl.sum((groups * scales[:, :, None]).reshape(1, x.shape[0], x.shape[1]), 0)


@triton.jit
def power_of_two(amax):
    """``(down, up)``: powers of two with amax * down in [2^13, 2^14) and down * up = 1; NaN and infinity stay so."""
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 14), 254)
    down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return down, up
