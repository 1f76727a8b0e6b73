"""Puts the partial results of the splits of one request together (Triton).

Split i leaves ``out_i`` (its own softmax average) and ``lse_i`` (base 2, minus infinity where it saw nothing). With
``m = max_i lse_i`` and ``w_i = 2^(lse_i - m)``:

    out = sum_i w_i out_i / sum_i w_i        lse = (m + log2 sum_i w_i) ln 2

(Flash-Decoding; the running form is Milakov and Gimelshein's, arXiv 1805.02867.)

A sink multiplies ``out`` by ``exp(lse) / (exp(lse) + exp(sink))``. Rows that no split saw give 0 and minus infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_compile.kernels.tiles_triton import LN2, LOG2E, LOWEST


@triton.jit
def sink_factor(sinks, head, total, lse2, valid):
    """``exp(lse) / (exp(lse) + exp(sink))`` for lse in base 2; 0 where ``total`` is 0, the row having seen nothing."""
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    return tl.where(total > 0.0, 1.0 / (1.0 + tl.exp2(sink - tl.where(total > 0.0, lse2, 0.0))), 0.0)


@triton.jit
def combine(
    part,
    part_lse,
    sinks,
    out,
    lse,
    H,
    NS,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Part f32 [NS,B*M,V], part_lse f32 [NS,B*M], both contiguous -> out [B*M,V], lse f32 [B*M] (natural logarithm).

    Grid (B*M, cdiv(V, BLOCK_V)). Blocks of BLOCK_S splits from split 0 on: empty splits past the last live one add
    exact zeros, so the result of a request does not depend on how many there are. ``part`` is read for live splits
    only.
    """
    if PDL:  # launched while the attention kernel drains: its results are complete from here on
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    rows = tl.num_programs(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    top = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, NS, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        part_row = split.to(tl.int64) * rows + row
        b_lse = tl.load(part_lse + part_row, mask=split < NS, other=float("-inf"))  # [BLOCK_S]
        live = (b_lse > float("-inf")) | (b_lse != b_lse)  # NaN is a result too
        b_part = tl.load(
            part + part_row[:, None] * V + v[None, :], mask=live[:, None] & (v < V)[None, :], other=0.0
        )  # [BLOCK_S,BLOCK_V]
        new_top = tl.maximum(top, tl.max(b_lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(b_lse - new_top)
        acc = acc * decay + tl.sum(weight[:, None] * b_part, 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    seen = (total > 0.0) | (total != total)
    lse2 = top + tl.log2(tl.where(seen, total, 1.0))
    scale = 1.0 / tl.where(seen, total, 1.0)
    b_out = acc * scale
    if sinks is not None:
        b_out = b_out * sink_factor(sinks, row % H, total, lse2, row >= 0)
    tl.store(out + row.to(tl.int64) * V + v, b_out.to(out.dtype.element_ty), mask=v < V)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(seen, lse2 * LN2, float("-inf")))
