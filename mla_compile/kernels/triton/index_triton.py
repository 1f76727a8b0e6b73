"""The indexer's scores (Triton). The products of all heads with a block of keys are summed before the store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_scores(
    query,
    keys,
    weights,
    out,
    query_b,
    query_s,
    query_j,
    query_d,
    keys_b,
    keys_t,
    keys_d,
    weights_b,
    weights_s,
    weights_j,
    scale,
    S,
    T,
    J: tl.constexpr,
    D: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out f32 [B,S,T] from query [B,S,J,D], keys [B,T,D] and weights [B,S,J] of any strides.

    The operands of products are in DTYPE, the sums in float32. Grid (B*S, cdiv(T, BLOCK_T)).
    """
    row = tl.program_id(0).to(tl.int64)
    b, s = row // S, row % S
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    key = keys + b * keys_b + t.to(tl.int64)[None, :] * keys_t
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, J, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        head = query + b * query_b + s * query_s + j[:, None] * query_j
        products = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            q = tl.load(head + d[None, :] * query_d, mask=(j < J)[:, None] & (d < D)[None, :], other=0.0)
            k = tl.load(key + d[:, None] * keys_d, mask=(d < D)[:, None] & (t < T)[None, :], other=0.0)
            products = tl.dot(q.to(DTYPE), k.to(DTYPE), products, input_precision=PRECISION)
        products *= scale
        w = tl.load(weights + b * weights_b + s * weights_s + j * weights_j, mask=j < J, other=0.0).to(tl.float32)
        # NaN stays NaN, and rows past the last head contribute nothing, whatever the keys hold.
        part = tl.where(products < 0.0, 0.0, products) * w[:, None]
        total += tl.sum(tl.where((j < J)[:, None], part, 0.0), 0)
    tl.store(out + row * T + t, total, mask=t < T)
