"""The rule of kernels/triton/schedule.py on the device, and the combine kernel for its scratch slots (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.combine_triton import finish, merge

PARTS = 8  # partitions per program, each compared with every request: up to 8 x 4096 comparisons at a time


@triton.jit
def cut(
    seq_lens,
    items,
    shift,
    first,
    count,
    B,
    T,
    partitions,
    reach,  # with a window: the number of rows that the query tokens of a request see in total; else None
    BLOCK_B: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """Partition a batch: seq_lens int32 [B] -> items int32 [partitions+1,2], and shift, first, count int32 [B].

    ``shift`` is a request's first scratch slot minus its first partition. Grid (cdiv(partitions+1, PARTS),).
    """
    b = tl.arange(0, BLOCK_B)
    valid = b < B
    length = tl.minimum(tl.maximum(tl.load(seq_lens + b, mask=valid, other=0), 0), T)
    blocks = tl.cdiv(length, BLOCK)  # [BLOCK_B]
    if reach is not None:
        blocks -= tl.maximum(length - reach, 0) // BLOCK
    cost = tl.where(valid, blocks + OVERHEAD, 0)
    end = tl.cumsum(cost, 0)
    start = end - cost
    pay = tl.maximum(tl.cdiv(tl.sum(cost, 0), partitions), 1)

    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    position = (p * pay)[:, None]  # [PARTS,1]
    # The overhead of a request follows its blocks. A position in the overhead counts as the start of the next request.
    passed = valid[None, :] & (position >= start[None, :] + tl.maximum(blocks, 1)[None, :])  # [PARTS,BLOCK_B]
    request = tl.sum(passed.to(tl.int32), 1)
    here = tl.where(b[None, :] == request[:, None], start[None, :], 0)
    block = tl.where(request < B, tl.maximum(p * pay - tl.sum(here, 1), 0), 0)
    tl.store(items + 2 * p, request, mask=p <= partitions)
    tl.store(items + 2 * p + 1, block, mask=p <= partitions)

    if tl.program_id(0) == 0:
        begin = start // pay
        pieces = (start + tl.maximum(blocks, 1) - 1) // pay - begin + 1
        cut_up = tl.where(valid & (pieces > 1), pieces, 0)
        slot = tl.cumsum(cut_up, 0) - cut_up
        tl.store(shift + b, slot - begin, mask=valid)
        tl.store(first + b, slot, mask=valid)
        tl.store(count + b, pieces, mask=valid)


@triton.jit
def combine_slots(
    part,
    part_lse,
    first,
    count,
    sinks,
    out,
    lse,
    M,
    H,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine part f32 [slots,M,V] and part_lse f32 [slots,M] (base 2) into out [B*M,V] and lse f32 [B*M].

    Only requests that were cut are written. The attention kernel wrote the others. Grid (B*M, V // BLOCK_V).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // M
    pieces = tl.load(count + b)
    if pieces > 1:
        v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        base = tl.load(first + b).to(tl.int64) * M + row % M
        acc, total, lse2 = merge(part, part_lse, base, M, pieces, v, V, BLOCK_S, BLOCK_V)
        finish(acc, total, lse2, sinks, out, lse, row, v, V, H, tl.program_id(1) == 0)
