"""Absorbed decode attention in Triton: contiguous and paged caches, any dtype, one loop over tiles of keys.

A block of BLOCK_M packed query rows of one request (row m is query token m // H, head m % H) walks the tiles of its
split, with the online softmax of Flash-Attention in base 2 (m: running maximum, l: running sum):

    s = (q . [c, r]) * scale * log2 e;  m' = max(m, max s);  p = 2^(s - m');  l = l 2^(m-m') + sum p
    acc = acc 2^(m-m') + p c

One load of the tile c serves both products. The flags below are compile-time constants: a disabled feature costs
nothing.

* Tiles are consecutive, or come from the list of visible ones (kernels/triton/tiles_triton.py); rows are addressed by
  an offset, or through a block table. All loads are masked: a row that nobody sees is never read, and zeros replace it
  (a weight of 0 times NaN is NaN). There is no separate loop for whole tiles: two loops spill registers.
* The running maximum starts at the lowest float32, so a row that has seen nothing makes no ``inf - inf``.
* Grid (row blocks, splits, B): the row blocks of one tile run side by side and share it through the L2 cache.
* With a list of keys for each query token, a block holds heads of one token, along the first axis of the grid only
  (kernels/triton/lists_triton.py).
* A float32 query with half precision rows is rounded to their dtype here, once. For float16, each row is first scaled
  to a largest magnitude of 2^13..2^14 by a power of two, and the scores are multiplied by its inverse.
* Hopper's products take a computed left factor from registers, 144 per thread for a query, and a loaded one from shared
  memory. A converted query is therefore written to scratch and loaded again (``staged``): all blocks that write a row
  write the same bits, and each reads only what it wrote itself.
* Those products address shared memory by descriptors, one for each 16 columns: 36 for the query, which are
  loop-invariant. LLVM would hoist them and keep them in registers beside the sums, so hoisting is disabled there
  (``disable_licm``). Products of single warps need the fragments of the query hoisted. With rows that are multiplied by
  scales of groups, there is no room for that (up to 520 bytes of spills).
* A base and its columns are added before a row's offset, because they are the same in every iteration, or for a page.
  With page look-ups, rope's offsets are added first: that takes fewer registers there, but more elsewhere.
* fp8 rows are e4m3 bits (``uint8``, converted by shifts: sm_80 has no such conversion) or ``float8e4nv``. One scale for
  all rows, or one per token, is a factor of the scores and of the weights. Scales of groups of columns are not: rows
  are multiplied by them in float32 and rounded to DTYPE, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.combine_triton import sink_factor
from mla_compile.kernels.triton.lists_triton import base_2, entries_of, names, write_places
from mla_compile.kernels.triton.operands_triton import power_of_two, times_groups, to_dot
from mla_compile.kernels.triton.tiles_triton import COUNT, LN2, LOG2E, LOWEST, TILE, WORD, key_range, tile_rows


@triton.jit
def attend(
    query,  # [B,S,H,L+R]
    latent,  # [B,T,L] or [P,PAGE,L]; rope and values alike
    rope,
    values,
    out,  # DIRECT: [B*M,V] in query's dtype; else float32 [NS,B*M,V]
    lse,  # DIRECT: float32 [B*M], natural logarithm; else [NS,B*M], base 2
    staged,  # [B*M,L+R] in DTYPE, scratch, or None: see the module's docstring
    table,  # int32 [B,maxpages] or None
    lengths,  # int32 [B] or None
    work,  # int64, see kernels/triton/tiles_triton.py, or None
    mask,  # uint8 or float [B,H,S,T] by strides; None: no mask, or ``work`` describes it completely
    indices,  # int32 [B,S,entries] or None
    places,  # int32 [B*S,entries], scratch, or None; see kernels/triton/lists_triton.py
    bias,  # float32 [B*S,entries], scratch, or None
    sinks,  # [H] or None
    kv_scale,  # [], by token, or by token and group
    scale,
    softcap,
    query_b,
    query_s,
    query_h,
    latent_b,
    latent_t,
    latent_c,
    rope_b,
    rope_t,
    rope_c,
    values_b,
    values_t,
    values_c,
    table_b,
    mask_b,
    mask_h,
    mask_s,
    mask_t,
    scale_b,
    scale_t,
    scale_g,
    work_b,  # 0 if all requests share one list
    work_plane,
    indices_b,
    indices_s,
    entries,
    S,
    H,
    T,  # capacity: tokens of the cache, or of a row of the block table
    least,  # least number of tiles of a split
    window,
    L: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,  # 0: contiguous, or consecutive pages and a list of places
    LIST_PAGE: tl.constexpr,  # rows of a page if a list is looked up in a block table, or 0
    LOOKED_UP: tl.constexpr,  # list entries that are looked up at a time
    WIDE: tl.constexpr,  # offsets inside a request (or a page) need 64 bits
    DTYPE: tl.constexpr,  # of the products
    PRECISION: tl.constexpr,  # of float32 products
    WARPGROUPS: tl.constexpr,  # Hopper's products
    NORMALIZE: tl.constexpr,  # float32 query with float16 rows
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK_ROWS: tl.constexpr,  # the mask differs between query rows
    TOKEN_SCALE: tl.constexpr,  # kv_scale differs between tokens
    GROUP: tl.constexpr,  # columns of a group with a common scale, if groups have separate scales; else 0
    ROPE_SCALED: tl.constexpr,  # kv_scale applies to rope, too
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one block of rows; see the module's docstring. Strides are in elements, named by tensor and axis."""
    i_m = tl.program_id(0)
    i_split = tl.program_id(1)
    if indices is None:
        b = tl.program_id(2)
        i_r = b  # the query rows belong to a request
        requests = tl.num_programs(2)
        M = S * H
    else:
        blocks = tl.cdiv(H, BLOCK_M)
        i_r = i_m // blocks  # or to a query token
        requests = tl.num_programs(0) // blocks
        i_m = i_m % blocks
        b = i_r // S
        M = H
    LISTED: tl.constexpr = indices is not None
    length, begin = key_range(lengths, b, S, T, window, WINDOW)
    if indices is not None:
        first = tl.zeros([], tl.int32)
        last = tl.cdiv(entries, BLOCK_N)
    elif work is not None:
        work += b.to(tl.int64) * work_b
        first = tl.zeros([], tl.int32)
        last = tl.load(work + COUNT * work_plane).to(tl.int32)
    else:
        first = begin // BLOCK_N
        last = tl.cdiv(length, BLOCK_N)
    per = tl.maximum(tl.cdiv(last - first, tl.num_programs(1)), least)
    first += i_split * per
    last = tl.minimum(first + per, last)

    m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = m < M
    o_row = (i_split.to(tl.int64) * requests + i_r) * M + m  # position of row m in out and lse
    # a split without tiles loads nothing; returning early instead costs 200 B of spills
    m_query = m_row & (first < last)

    if indices is None:
        s_token = m // H
        head = m % H
    else:
        s_token = i_r % S
        head = m
    p_query = (
        query + b.to(tl.int64) * query_b + s_token.to(tl.int64) * query_s + head.to(tl.int64) * query_h
    )  # [BLOCK_M]
    c_l = tl.arange(0, BLOCK_L)
    if WIDE:
        c_l = c_l.to(tl.int64)
    m_q = m_query[:, None]
    if BLOCK_L != L:
        m_q = m_q & (c_l < L)[None, :]
    b_q = tl.load(p_query[:, None] + c_l[None, :], mask=m_q, other=0.0)  # [BLOCK_M,BLOCK_L]
    if R > 0:
        c_r = tl.arange(0, BLOCK_R)
        if WIDE:
            c_r = c_r.to(tl.int64)
        m_qr = m_query[:, None]
        if BLOCK_R != R:
            m_qr = m_qr & (c_r < R)[None, :]
        b_qr = tl.load(p_query[:, None] + (L + c_r)[None, :], mask=m_qr, other=0.0)  # [BLOCK_M,BLOCK_R]
    if NORMALIZE:
        amax = tl.max(tl.abs(b_q), 1)
        if R > 0:
            amax = tl.maximum(amax, tl.max(tl.abs(b_qr), 1))
        down, up = power_of_two(amax)
        b_q = b_q * down[:, None]
        if R > 0:
            b_qr = b_qr * down[:, None]
        row_scale = scale * up  # [BLOCK_M]
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

    # Bases of this request's rows; pages are addressed from the start of the cache.
    if table is None:
        latent += b.to(tl.int64) * latent_b
        if R > 0:
            rope += b.to(tl.int64) * rope_b
        if values is not None:
            values += b.to(tl.int64) * values_b
        if TOKEN_SCALE or GROUP > 0:
            kv_scale += b.to(tl.int64) * scale_b
    else:
        table += b.to(tl.int64) * table_b
    if mask is not None:
        mask += b.to(tl.int64) * mask_b
        if indices is not None:
            mask += s_token.to(tl.int64) * mask_s
        elif MASK_ROWS:
            p_mask = mask + head.to(tl.int64) * mask_h + s_token.to(tl.int64) * mask_s  # [BLOCK_M]
    if kv_scale is not None:
        if not TOKEN_SCALE and GROUP == 0:
            b_kv = tl.load(kv_scale).to(tl.float32)
    end = length - S + s_token  # causal: the last key that the row sees

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if work is not None:  # loaded one iteration ahead, so that no iteration waits for its own place in the list
        work += first
        next_tile = tl.load(work + TILE * work_plane, mask=first < last, other=0)
        next_word = tl.load(work + WORD * work_plane, mask=first < last, other=0)
    if indices is not None:
        indices += b.to(tl.int64) * indices_b + s_token.to(tl.int64) * indices_s
        if places is not None:
            places += i_r.to(tl.int64) * entries
            if bias is not None:
                bias += i_r.to(tl.int64) * entries
            stop = tl.minimum(last * BLOCK_N, entries)
            for start in range(first * BLOCK_N, stop, LOOKED_UP):
                write_places(
                    indices, table, mask, places, bias, start, stop, length, end, window, mask_t,
                    LIST_PAGE, LOOKED_UP, CAUSAL, WINDOW,
                )  # fmt: skip
            tl.debug_barrier()
            indices = places
        next_n = entries_of(indices, first, entries, BLOCK_N, -1)
        if bias is not None:
            next_bias = entries_of(bias, first, entries, BLOCK_N, 0.0)
    for i in tl.range(first, last, disable_licm=WARPGROUPS or GROUP > 0):
        if work is not None:
            tile = next_tile.to(tl.int32)
            word = next_word
            work += 1
            next_tile = tl.load(work + TILE * work_plane, mask=i + 1 < last, other=0)
            next_word = tl.load(work + WORD * work_plane, mask=i + 1 < last, other=0)
        else:
            tile = i
        start = tile * BLOCK_N
        if indices is None:
            n = start + tl.arange(0, BLOCK_N)
            seen = n < length  # [BLOCK_N]: seen by some row of the request
            if WINDOW:
                seen = seen & (n >= begin)
        else:
            n = next_n
            next_n = entries_of(indices, i + 1, entries, BLOCK_N, -1)
            if bias is not None:
                b_bias = next_bias
                next_bias = entries_of(bias, i + 1, entries, BLOCK_N, 0.0)
            if places is not None:
                seen = n >= 0
            else:
                seen = names(n, length, end, window, CAUSAL, WINDOW)
            n = tl.where(seen, n, 0)
        if work is not None:
            seen = seen & (((word >> tl.arange(0, BLOCK_N).to(tl.int64)) & 1) != 0)
        p_k, o_k = tile_rows(latent, table, start, n, length, latent_b, latent_t, PAGE, BLOCK_N, WIDE, LISTED)
        m_k = seen[:, None]
        if BLOCK_L != L:
            m_k = m_k & (c_l < L)[None, :]
        b_k = tl.load((p_k + c_l * latent_c)[None, :] + o_k[:, None], mask=m_k, other=0.0)  # [BLOCK_N,BLOCK_L]
        if GROUP > 0:
            p_g, o_g = tile_rows(kv_scale, table, start, n, length, scale_b, scale_t, PAGE, BLOCK_N, WIDE, LISTED)
            c_g = tl.arange(0, BLOCK_L // GROUP)
            m_g = seen[:, None]
            if BLOCK_L != L:
                m_g = m_g & (c_g < L // GROUP)[None, :]
            b_g = tl.load((p_g + c_g * scale_g)[None, :] + o_g[:, None], mask=m_g, other=0.0)  # [BLOCK_N,groups]
            b_k = times_groups(b_k, b_g, GROUP)
        b_k = to_dot(b_k, DTYPE)
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)  # [BLOCK_M,BLOCK_N]
        if TOKEN_SCALE:
            p_kv, o_kv = tile_rows(kv_scale, table, start, n, length, scale_b, scale_t, PAGE, BLOCK_N, WIDE, LISTED)
            b_kv = tl.load(p_kv + o_kv, mask=seen, other=0.0).to(tl.float32)[None, :]  # [1,BLOCK_N]
        if kv_scale is not None:
            if not ROPE_SCALED and GROUP == 0:
                b_s = b_s * b_kv
        if R > 0:
            p_r, o_r = tile_rows(rope, table, start, n, length, rope_b, rope_t, PAGE, BLOCK_N, WIDE, LISTED)
            m_r = seen[:, None]
            if BLOCK_R != R:
                m_r = m_r & (c_r < R)[None, :]
            if PAGE > 0:
                p_r = p_r + (o_r[:, None] + c_r[None, :] * rope_c)  # [BLOCK_N,BLOCK_R]
            else:
                p_r = (p_r + c_r * rope_c)[None, :] + o_r[:, None]  # [BLOCK_N,BLOCK_R]
            b_r = to_dot(tl.load(p_r, mask=m_r, other=0.0), DTYPE)
            b_s = tl.dot(b_qr, b_r.T, b_s, input_precision=PRECISION)
        if kv_scale is not None:
            if ROPE_SCALED:
                b_s = b_s * b_kv
        if NORMALIZE:
            b_s = b_s * row_scale[:, None]
        else:
            b_s = b_s * scale
        if SOFTCAP:  # scale includes 1 / softcap; tanh x = 2 / (1 + e^-2x) - 1
            b_s = (2.0 / (1.0 + tl.exp2(b_s * (-2.0 * LOG2E))) - 1.0) * softcap
        if CAUSAL and indices is None:
            visible = n[None, :] <= end[:, None]
            if work is not None:
                visible = visible & seen[None, :]
        else:
            visible = seen[None, :]
        if WINDOW and indices is None:
            visible = visible & (n[None, :] > end[:, None] - window)
        if bias is not None:
            b_s = b_s + b_bias[None, :]
        if mask is not None and indices is None:
            if WIDE:
                n = n.to(tl.int64)
            if MASK_ROWS:
                o_mask = p_mask[:, None] + (n * mask_t)[None, :]
                m_mask = seen[None, :] & m_row[:, None]
            else:
                o_mask = mask + (n * mask_t)[None, :]
                m_mask = seen[None, :]
            b_mask = tl.load(o_mask, mask=m_mask, other=0)
            if mask.dtype.element_ty == tl.uint8:
                visible = visible & (b_mask != 0)
            else:
                b_s = b_s + base_2(b_mask)
        b_s = tl.where(visible, b_s, float("-inf"))
        new_top = tl.maximum(top, tl.max(b_s, 1))
        decay = tl.exp2(top - new_top)
        b_p = tl.exp2(b_s - new_top[:, None])
        total = total * decay + tl.sum(b_p, 1)
        acc = acc * decay[:, None]
        if TOKEN_SCALE:
            b_p = b_p * b_kv
        if values is not None:
            p_v, o_v = tile_rows(values, table, start, n, length, values_b, values_t, PAGE, BLOCK_N, WIDE, LISTED)
            c_v = tl.arange(0, BLOCK_V)
            if WIDE:
                c_v = c_v.to(tl.int64)
            m_v = seen[:, None]
            if BLOCK_V != V:
                m_v = m_v & (c_v < V)[None, :]
            b_v = to_dot(tl.load((p_v + c_v * values_c)[None, :] + o_v[:, None], mask=m_v, other=0.0), DTYPE)
            acc = tl.dot(b_p.to(DTYPE), b_v, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(b_p.to(DTYPE), b_k, acc, input_precision=PRECISION)
        top = new_top

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    some = (total > 0.0) | (total != total)  # a NaN among the visible keys is a result, not an empty row
    lse2 = top + tl.log2(tl.where(some, total, 1.0))
    factor = 1.0 / tl.where(some, total, 1.0)
    if kv_scale is not None:
        if not TOKEN_SCALE and GROUP == 0:
            factor = factor * b_kv
    acc = acc * factor[:, None]
    if DIRECT:
        if sinks is not None:
            acc = acc * sink_factor(sinks, head, total, lse2, m_row)[:, None]
        lse2 = lse2 * LN2
        m_o = m_row[:, None]
    else:
        m_o = (m_row & some)[:, None]  # the combine kernel does not read other rows
    c_o = tl.arange(0, BLOCK_V)
    if BLOCK_V != V:
        m_o = m_o & (c_o < V)[None, :]
    tl.store(out + o_row[:, None] * V + c_o[None, :], acc.to(out.dtype.element_ty), mask=m_o)
    tl.store(lse + o_row, tl.where(some, lse2, float("-inf")), mask=m_row)
