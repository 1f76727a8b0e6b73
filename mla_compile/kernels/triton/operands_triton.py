"""Preparation of rows and queries before their products in attention (decode_triton.py): dtypes, scales, ranges."""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.tiles_triton import tile_rows


@triton.jit
def columns(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The numbers of BLOCK columns; 64-bit with WIDE, where offsets inside a request or a page need that."""
    c = tl.arange(0, BLOCK)
    return c.to(tl.int64) if WIDE else c


@triton.jit
def inside(rows, c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The mask [rows,BLOCK] of ``rows`` and of the columns c below SIZE; [rows,1] if BLOCK equals SIZE."""
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
    """The rows of ``x`` of the tokens n that are ``seen`` [BLOCK_N,BLOCK], zeros elsewhere; see :func:`tile_rows`.

    Pointer and columns are added before the offsets of rows, because their sum is the same in every iteration, or for
    all rows of a page. With OFFSETS_FIRST, offsets and columns are added first.
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
    """A loaded tile in the dtype of the products. Bits of e4m3: sign, 4 of exponent (bias 7), 3 of mantissa.

    Shifted left by 7, exponent and mantissa are where float16 has them, and its bias is 8 larger. As float16, these
    bits are therefore the value times 2^-8, subnormals included. NaN is 0x7f.
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

    The sum runs over a single term, only to stop a search: Triton searches the producers of a product's operands for
    the narrowest dtype and stops only at reductions. Without the sum, it would find float8 and load rows in an order
    that ldmatrix lacks.
    """
    groups = to_dot(x, tl.float32).reshape(x.shape[0], x.shape[1] // GROUP, GROUP)
    return tl.sum((groups * scales[:, :, None]).reshape(1, x.shape[0], x.shape[1]), 0)


@triton.jit
def power_of_two(amax):
    """``(down, up)``: powers of two with amax * down in [2^13, 2^14) and down * up = 1; NaN and infinity are kept.

    An amax below 2^-113 becomes less than 2^13.
    """
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 14), 254)
    down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return down, up
