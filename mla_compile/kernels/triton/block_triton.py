"""The block of query rows that one program of decode attention serves: its rows and tiles, its query, its result.

* The grid is (row blocks, splits, B). Row blocks that read the same tile run side by side, and share the tile through
  the L2 cache.
* With an index list for each query token (kernels/triton/lists_triton.py), a block holds heads of one token, and axis 0
  of the grid counts the blocks of all requests and tokens.
* A float32 query with half precision rows is rounded to the dtype of the rows once. For float16, each query row is
  first multiplied by a power of two, so that its largest magnitude is in 2^13..2^14. The scores of the query row are
  multiplied by the inverse of that power.
* Hopper's products take a loaded left factor from shared memory, but a computed left factor from registers (for a
  query, 144 per thread). A converted query is therefore written to scratch and loaded again (``staged``). Several
  blocks may write a row, but they write equal values. Each block reads only what it wrote itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.combine_triton import sink_factor
from mla_compile.kernels.triton.operands_triton import columns, inside, power_of_two
from mla_compile.kernels.triton.tiles_triton import COUNT, LN2, key_range


@triton.jit
def block_of(
    lengths, indices, work,
    work_b, work_plane,
    entries,
    S, H, T,
    least,
    window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return what this program serves, given the arguments of decode_triton.py.

    The results are, in this order:

    * b: the request.
    * i_r, M: the unit that is cut into blocks, and its number of query rows. The unit is the request (i_r = b), or with
      index lists a query token (i_r = b * S + s).
    * m, s, head [BLOCK_M]: each row's number among the M rows, its query token (with index lists a scalar), its head.
    * valid [BLOCK_M]: whether the row exists. loaded [BLOCK_M]: whether, in addition, the split has tiles.
    * row [BLOCK_M]: the row's place in ``out``.
    * length, begin: the rows see only keys in [begin, length).
    * first, last: the tiles [first, last) of the split. With a list of tiles or keys, these are places in the list.
    """
    i_m = tl.program_id(0)
    i_split = tl.program_id(1)
    if indices is None:
        b = tl.program_id(2)
        i_r = b
        requests = tl.num_programs(2)
        M = S * H
    else:
        blocks = tl.cdiv(H, BLOCK_M)
        i_r = i_m // blocks
        requests = tl.num_programs(0) // blocks
        i_m = i_m % blocks
        b = i_r // S
        M = H
    length, begin = key_range(lengths, b, S, T, window, WINDOW)
    if indices is not None:
        first = tl.zeros([], tl.int32)
        last = tl.cdiv(entries, BLOCK_N)
    elif work is not None:
        first = tl.zeros([], tl.int32)
        last = tl.load(work + b.to(tl.int64) * work_b + COUNT * work_plane).to(tl.int32)
    else:
        first = begin // BLOCK_N
        last = tl.cdiv(length, BLOCK_N)
    per = tl.maximum(tl.cdiv(last - first, tl.num_programs(1)), least)
    first += i_split * per
    last = tl.minimum(first + per, last)
    m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < M
    row = (i_split.to(tl.int64) * requests + i_r) * M + m
    loaded = valid & (first < last)  # not an early return, which costs 200 B of spills
    if indices is None:
        return b, i_r, M, m, m // H, m % H, valid, loaded, row, length, begin, first, last
    else:
        return b, i_r, M, m, i_r % S, m, valid, loaded, row, length, begin, first, last


@triton.jit
def query_of(
    p_query,  # [BLOCK_M], the first column of each row
    staged,
    i_r, M, m,  # as block_of returns them
    loaded,  # [BLOCK_M]
    scale,
    L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, WIDE: tl.constexpr,
    DTYPE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Return the query b_q [BLOCK_M,BLOCK_L] and b_qr [BLOCK_M,BLOCK_R] in DTYPE, and the scale of its scores.

    Without a rotary part (R = 0), b_qr is b_q. The scale is [BLOCK_M] with NORMALIZE.
    """
    c_l = columns(BLOCK_L, WIDE)
    m_q = inside(loaded, c_l, L, BLOCK_L)
    b_q = tl.load(p_query[:, None] + c_l[None, :], mask=m_q, other=0.0)
    if R > 0:
        c_r = columns(BLOCK_R, WIDE)
        m_qr = inside(loaded, c_r, R, BLOCK_R)
        b_qr = tl.load(p_query[:, None] + (L + c_r)[None, :], mask=m_qr, other=0.0)
    if NORMALIZE:
        amax = tl.max(tl.abs(b_q), 1)
        if R > 0:
            amax = tl.maximum(amax, tl.max(tl.abs(b_qr), 1))
        down, up = power_of_two(amax)
        b_q = b_q * down[:, None]
        if R > 0:
            b_qr = b_qr * down[:, None]
        scale = scale * up
    b_q = b_q.to(DTYPE)
    if R > 0:
        b_qr = b_qr.to(DTYPE)
    if staged is not None:
        p_staged = staged + (i_r.to(tl.int64) * M + m)[:, None] * (L + R)
        tl.store(p_staged + c_l[None, :], b_q, mask=m_q)
        if R > 0:
            tl.store(p_staged + (L + c_r)[None, :], b_qr, mask=m_qr)
        tl.debug_barrier()
        b_q = tl.load(p_staged + c_l[None, :], mask=m_q, other=0.0)
        if R > 0:
            b_qr = tl.load(p_staged + (L + c_r)[None, :], mask=m_qr, other=0.0)
    if R == 0:
        b_qr = b_q
    return b_q, b_qr, scale


@triton.jit
def write_block(
    acc,  # [BLOCK_M,BLOCK_V]
    top,  # [BLOCK_M], base 2
    total,
    factor_v,  # the scale of all values, or None
    sinks,
    head,
    out,
    lse,
    row,  # [BLOCK_M], of out and lse
    valid,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Write the result of a block: to the caller's tensors (DIRECT), or as a partial result for the combine kernel."""
    some = (total > 0.0) | (total != total)  # a NaN among the visible keys is a result, not an empty row
    lse2 = top + tl.log2(tl.where(some, total, 1.0))
    factor = 1.0 / tl.where(some, total, 1.0)
    if factor_v is not None:
        factor = factor * factor_v
    acc = acc * factor[:, None]
    if DIRECT:
        if sinks is not None:
            acc = acc * sink_factor(sinks, head, total, lse2, valid)[:, None]
        lse2 = lse2 * LN2
        stored = valid
    else:
        stored = valid & some  # the combine kernel does not read other rows
    c_o = tl.arange(0, BLOCK_V)
    m_o = inside(stored, c_o, V, BLOCK_V)
    tl.store(out + row[:, None] * V + c_o[None, :], acc.to(out.dtype.element_ty), mask=m_o)
    tl.store(lse + row, tl.where(some, lse2, float("-inf")), mask=valid)
