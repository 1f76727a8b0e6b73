"""Prepares rows and queries for the products of attention (decode_triton.py): dtypes, scales, ranges."""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.tiles_triton import tile_rows


@triton.jit
def columns(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the column numbers 0 to BLOCK - 1, with 64 bits if WIDE (offsets may exceed 32 bits)."""
    c = tl.arange(0, BLOCK)
    return c.to(tl.int64) if WIDE else c


@triton.jit
def inside(rows, c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask [rows,BLOCK] of ``rows`` and the columns c below SIZE. It is [rows,1] if BLOCK equals SIZE."""
    if BLOCK == SIZE:
        return rows[:, None]
    else:
        return rows[:, None] & (c < SIZE)[None, :]


@triton.jit
def load_tile(
    x,
    table,
    start,
    n,
    seen,
    length,
    stride_b,
    stride_t,
    stride_c,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
    OFFSETS_FIRST: tl.constexpr,
):
    """Return the rows [BLOCK_N,BLOCK] of ``x`` for tokens n; zeros if not ``seen``. See :func:`tile_rows`.

    Column offsets are added to the pointer first, because this sum is the same in every iteration, or for all rows of a
    page. With OFFSETS_FIRST, column offsets are added to row offsets first.
    """
    p, o = tile_rows(x, table, start, n, length, stride_b, stride_t, PAGE, BLOCK_N, WIDE, LISTED)
    c = columns(BLOCK, WIDE)
    mask = inside(seen, c, SIZE, BLOCK)
    if OFFSETS_FIRST:
        p = p + (o[:, None] + c[None, :] * stride_c)
    else:
        p = (p + c * stride_c)[None, :] + o[:, None]
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def to_dot(x, DTYPE: tl.constexpr):
    """Convert a loaded tile to the dtype of the products.

    An e4m3 byte has a sign bit, 4 exponent bits (bias 7) and 3 mantissa bits. A shift by 7 moves exponent and mantissa
    to their places in float16, whose bias is 8 larger. The shifted bits, read as float16, are therefore the value times
    2^-8, even for subnormals. NaN is 0x7f.
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
    """Return rows x [N,L] in float32, with each group of columns multiplied by its scale; scales [N,L/GROUP].

    The sum over a single term only stops a search: among the producers of a product's operands, Triton looks for the
    narrowest dtype, up to a reduction. Without the sum, Triton would find float8 and load the rows in an order that
    ldmatrix does not support.
    """
    groups = to_dot(x, tl.float32).reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    return tl.sum((groups * scales[:, :, None]).reshape(1, x.shape[0], x.shape[1]), 0)


@triton.jit
def power_of_two(amax):
    """Return powers of two ``(down, up)`` with amax * down in [2^13, 2^14) and down * up = 1.

    If amax is below 2^-113, amax * down is below 2^13. If amax is NaN or infinity, so is the product.
    """
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 14), 254)
    down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return down, up
