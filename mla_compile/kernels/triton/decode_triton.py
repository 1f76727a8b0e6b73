"""Absorbed decode attention in Triton, for contiguous and paged caches of all dtypes but float64.

A block of BLOCK_M packed query rows of one request (row i is query token i // H, head i % H; block_triton.py) walks the
tiles of its split, with the online softmax of Flash-Attention in base 2 (m: running maximum, l: running sum):

    s = (q . [c, r]) * scale * log2 e;  m' = max(m, max s);  p = 2^(s - m');  l = l 2^(m-m') + sum p
    acc = acc 2^(m-m') + p c

The tile c is loaded once for both products. Compile-time constants switch features, so a disabled feature costs
nothing.

* Tiles are consecutive, or come from the list of visible tiles (kernels/triton/tiles_triton.py). Rows are addressed by
  an offset, or through a block table. All loads are masked. A row that no query sees is never read. Zeros replace the
  row, because a weight of 0 times NaN is NaN. Whole tiles have no separate loop, because two loops spill registers.
* The running maximum starts at the lowest float32, so a query row that has seen no key makes no ``inf - inf``.
* Hopper's products address shared memory by descriptors, one for each 16 columns. The query's 36 descriptors do not
  change in the loop. LLVM would hoist them into registers that the sums need, so hoisting is disabled for Hopper's
  products (``disable_licm``). Products of single warps, in contrast, need the query's fragments hoisted. With per-group
  scales, hoisting is disabled for all products, because it would spill up to 520 bytes.
* With page look-ups, rope's row and column offsets are added together before the pointer is added. This saves registers
  for rope, but would cost registers for the other rows.
* fp8 rows are passed as ``float8e4nv``. GPUs before sm_89 have no conversion from e4m3, so they get bits (``uint8``)
  and convert by shifts. A scale for all rows multiplies the scores and the result. A scale per token multiplies the
  scores and the softmax weights. With per-group scales, the rows are multiplied in float32 and rounded to DTYPE once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.block_triton import block_of, query_of, write_block
from mla_compile.kernels.triton.lists_triton import entries_of, names, write_places
from mla_compile.kernels.triton.operands_triton import load_tile, to_dot
from mla_compile.kernels.triton.scores_triton import capped, hidden, mask_rows, scores_of
from mla_compile.kernels.triton.tiles_triton import LOWEST, keys_of, listed_tile


@triton.jit
def attend(
    query,  # [B,S,H,L+R]
    latent, rope, values,  # [B,T,L] or [P,PAGE,L]; rope and values have the same form
    out,  # DIRECT: [B*M,V] in query's dtype; else float32 [NS,B*M,V]
    lse,  # DIRECT: float32 [B*M], natural logarithm; else [NS,B*M], base 2
    staged,  # [B*M,L+R] in DTYPE, scratch, or None: see block_triton.py
    table, lengths,  # int32 [B,maxpages] or None, and [B] or None
    work,  # int64, see kernels/triton/tiles_triton.py, or None
    mask,  # uint8 or float [B,H,S,T] by strides; None: no mask, or ``work`` describes it completely
    indices,  # int32 [B,S,entries] or None
    places, bias,  # int32 and float32 [B*S,entries], scratch, or None; see kernels/triton/lists_triton.py
    sinks,  # [H] or None
    kv_scale,  # [], by token, or by token and group
    scale, softcap,
    query_b, query_s, query_h,
    latent_b, latent_t, latent_c,
    rope_b, rope_t, rope_c,
    values_b, values_t, values_c,
    table_b,
    mask_b, mask_h, mask_s, mask_t,
    scale_b, scale_t, scale_g,
    work_b, work_plane,  # work_b: 0 if all requests share one list
    indices_b, indices_s, entries, S, H,
    T,  # capacity: tokens of the cache, or of a row of the block table
    least,  # least number of tiles of a split
    window,
    L: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,  # 0: a contiguous cache, or index lists over pages that are consecutive in memory
    LIST_PAGE: tl.constexpr,  # rows of a page if a list is looked up in a block table, or 0
    LOOKED_UP: tl.constexpr,  # list entries that are looked up at a time
    WIDE: tl.constexpr,  # offsets inside a request (or a page) need 64 bits
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,  # dtype of the products; precision of float32 products
    WARPGROUPS: tl.constexpr,  # products are computed by Hopper's warpgroups
    NORMALIZE: tl.constexpr,  # float32 query with float16 rows
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASK_ROWS: tl.constexpr,  # the mask differs between query rows
    TOKEN_SCALE: tl.constexpr,  # kv_scale differs between tokens
    GROUP: tl.constexpr,  # with per-group scales: columns of a group; else 0
    ROPE_SCALED: tl.constexpr,  # kv_scale applies to rope, too
    DIRECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one split of a block of query rows. Strides are in elements, and named by tensor and axis."""
    b, i_r, M, m, s_token, head, valid, loaded, row, length, begin, first, last = block_of(
        lengths, indices, work, work_b, work_plane, entries, S, H, T, least, window, BLOCK_M, BLOCK_N, WINDOW
    )
    LISTED: tl.constexpr = indices is not None
    p_query = query + b.to(tl.int64) * query_b + s_token.to(tl.int64) * query_s + head.to(tl.int64) * query_h
    b_q, b_qr, scale = query_of(
        p_query, staged, i_r, M, m, loaded, scale, L, R, BLOCK_L, BLOCK_R, WIDE, DTYPE, NORMALIZE
    )
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
        mask = mask_rows(mask, b, s_token, head, mask_b, mask_h, mask_s, LISTED, MASK_ROWS)
    one_scale = None
    if kv_scale is not None and not TOKEN_SCALE and GROUP == 0:
        one_scale = tl.load(kv_scale).to(tl.float32)
    end = length - S + s_token  # causal: the last key that the row sees

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if work is not None:  # loaded one iteration ahead, so that no iteration waits for its own place in the list
        work += b.to(tl.int64) * work_b
        work += first
        next_tile, next_word = listed_tile(work, work_plane, first < last)
    if LISTED:
        indices += b.to(tl.int64) * indices_b + s_token.to(tl.int64) * indices_s
        if places is not None:
            places += i_r.to(tl.int64) * entries
            if bias is not None:
                bias += i_r.to(tl.int64) * entries
            stop = tl.minimum(last * BLOCK_N, entries)
            write_places(
                indices, table, mask, places, bias, first * BLOCK_N, stop, length, end, window, mask_t,
                LIST_PAGE, LOOKED_UP, CAUSAL, WINDOW,
            )  # fmt: skip
            indices = places
        next_n = entries_of(indices, first, entries, BLOCK_N, -1)
        if bias is not None:
            next_bias = entries_of(bias, first, entries, BLOCK_N, 0.0)
    for i in tl.range(first, last, disable_licm=WARPGROUPS or GROUP > 0):
        if work is not None:
            tile = next_tile.to(tl.int32)
            word = next_word
            work += 1
            next_tile, next_word = listed_tile(work, work_plane, i + 1 < last)
        else:
            tile = i
        start = tile * BLOCK_N
        if LISTED:
            n = next_n
            next_n = entries_of(indices, i + 1, entries, BLOCK_N, -1)
            if bias is not None:
                b_bias = next_bias
                next_bias = entries_of(bias, i + 1, entries, BLOCK_N, 0.0)
            seen = n >= 0 if places is not None else names(n, length, end, window, CAUSAL, WINDOW)
            n = tl.where(seen, n, 0)
        else:
            n, seen = keys_of(tile, length, begin, BLOCK_N, WINDOW)
        if work is not None:
            seen = seen & (((word >> tl.arange(0, BLOCK_N).to(tl.int64)) & 1) != 0)
        b_k, b_s, b_kv = scores_of(
            b_q, b_qr, scale, one_scale, latent, rope, kv_scale, table, start, n, seen, length,
            latent_b, latent_t, latent_c, rope_b, rope_t, rope_c, scale_b, scale_t, scale_g,
            L, R, BLOCK_L, BLOCK_R, PAGE, BLOCK_N, WIDE, LISTED,
            DTYPE, PRECISION, NORMALIZE, TOKEN_SCALE, GROUP, ROPE_SCALED,
        )  # fmt: skip
        if SOFTCAP:
            b_s = capped(b_s, softcap)
        if LISTED:
            visible = seen[None, :]
            if bias is not None:
                b_s = b_s + b_bias[None, :]
            b_s = tl.where(visible, b_s, float("-inf"))
        else:
            b_s = hidden(
                b_s, n, seen, end, window, mask, mask_t, valid, work is not None, CAUSAL, WINDOW, MASK_ROWS, WIDE
            )
        new_top = tl.maximum(top, tl.max(b_s, 1))
        decay = tl.exp2(top - new_top)
        b_p = tl.exp2(b_s - new_top[:, None])
        total = total * decay + tl.sum(b_p, 1)
        acc = acc * decay[:, None]
        if TOKEN_SCALE:
            b_p = b_p * b_kv
        if values is not None:
            b_v = load_tile(
                values, table, start, n, seen, length, values_b, values_t, values_c, V, BLOCK_V,
                PAGE, BLOCK_N, WIDE, LISTED, OFFSETS_FIRST=False,
            )  # fmt: skip
            b_v = to_dot(b_v, DTYPE)
        else:
            b_v = b_k
        acc = tl.dot(b_p.to(DTYPE), b_v, acc, input_precision=PRECISION)
        top = new_top

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    write_block(acc, top, total, one_scale, sinks, head, out, lse, row, valid, V, BLOCK_V, DIRECT)
