"""Combines the partial results of the splits of one request (Triton).

Split i leaves ``out_i`` (the softmax average over its keys) and ``lse_i`` (base 2; minus infinity if the query row saw
no key of the split). With ``m = max_i lse_i`` and ``w_i = 2^(lse_i - m)``:

    out = sum_i w_i out_i / sum_i w_i        lse = (m + log2 sum_i w_i) ln 2

(Flash-Decoding; the incremental form is Milakov and Gimelshein's, arXiv 1805.02867.)

A sink multiplies ``out`` by ``exp(lse) / (exp(lse) + exp(sink))``. If a query row saw no key in any split, ``out`` is 0
and ``lse`` minus infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.tiles_triton import LN2, LOG2E, LOWEST


@triton.jit
def sink_factor(sinks, head, total, lse2, valid):
    """Return ``exp(lse) / (exp(lse) + exp(sink))`` for lse in base 2; 0 if ``total`` is 0 (the row saw no key)."""
    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    return tl.where(total > 0.0, 1.0 / (1.0 + tl.exp2(sink - tl.where(total > 0.0, lse2, 0.0))), 0.0)


@triton.jit
def merge(part, part_lse, first, step, pieces, columns, width, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return ``(acc, total, lse2)`` of one row: the two sums of the module's formula, and the LSE in base 2.

    ``out`` is acc / total. Partial result i is row ``first + i * step`` (int64) of part f32 [..,width] and part_lse f32
    [..]. ``columns`` is a block of BLOCK_V columns. The loop takes BLOCK_S partial results at a time. Empty ones add
    exact zeros, so their number does not change the result. ``part`` is not read for empty ones.
    """
    top = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for begin in range(0, pieces, BLOCK_S):
        piece = begin + tl.arange(0, BLOCK_S)
        row = first + piece.to(tl.int64) * step
        b_lse = tl.load(part_lse + row, mask=piece < pieces, other=float("-inf"))  # [BLOCK_S]
        live = (b_lse > float("-inf")) | (b_lse != b_lse)  # NaN is a result, too
        b_part = tl.load(
            part + row[:, None] * width + columns[None, :], mask=live[:, None] & (columns < width)[None, :], other=0.0
        )  # [BLOCK_S,BLOCK_V]
        new_top = tl.maximum(top, tl.max(b_lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(b_lse - new_top)
        acc = acc * decay + tl.sum(weight[:, None] * b_part, 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    some = (total > 0.0) | (total != total)
    return acc, total, top + tl.log2(tl.where(some, total, 1.0))


@triton.jit
def finish(acc, total, lse2, sinks, out, lse, row, columns, width, H, WRITE_LSE):
    """Write a merged row of out [rows,width] and lse f32 [rows] (natural). An empty row gets 0 and minus infinity."""
    some = (total > 0.0) | (total != total)
    b_out = acc * (1.0 / tl.where(some, total, 1.0))
    if sinks is not None:
        b_out = b_out * sink_factor(sinks, row % H, total, lse2, row >= 0)
    tl.store(out + row.to(tl.int64) * width + columns, b_out.to(out.dtype.element_ty), mask=columns < width)
    if WRITE_LSE:
        tl.store(lse + row, tl.where(some, lse2 * LN2, float("-inf")))


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
    """Combine part f32 [NS,B*M,V] and part_lse f32 [NS,B*M], both contiguous, into out [B*M,V] and lse f32 [B*M].

    lse is a natural logarithm. Grid (B*M, cdiv(V, BLOCK_V)).
    """
    if PDL:  # this kernel may start before attention has finished; after the wait, attention's results are complete
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.num_programs(0).to(tl.int64)
    acc, total, lse2 = merge(part, part_lse, row.to(tl.int64), rows, NS, v, V, BLOCK_S, BLOCK_V)
    finish(acc, total, lse2, sinks, out, lse, row, v, V, H, tl.program_id(1) == 0)
