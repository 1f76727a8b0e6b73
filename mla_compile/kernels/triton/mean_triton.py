"""The mean of a cache's rows, for the batch entries that need it (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_T, BLOCK_V = 64, 64


@triton.jit
def means(
    rows,
    wanted,
    out,
    T,
    width,
    stride_b,
    stride_t,
    stride_v,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the mean over T of rows [B,T,width] of any strides to out f32 [B,width], if wanted int32 [B] is not 0.

    Grid (B, cdiv(width, BLOCK_V)).
    """
    b = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + b) == 0:
        return
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for begin in range(0, T, BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T)).to(tl.int64)
        b_rows = tl.load(
            rows + b * stride_b + t[:, None] * stride_t + v[None, :] * stride_v,
            mask=(t < T)[:, None] & (v < width)[None, :],
            other=0.0,
        )
        acc += tl.sum(b_rows.to(tl.float32), 0)
    tl.store(out + b * width + v, acc / T, mask=v < width)
