"""Functions that the Triton kernels share, and the pre-pass that turns a mask into a list of tiles.

:func:`scan_mask` reads a mask once and makes one 64-bit word for every tile of BLOCK_N keys. Bit n is set if some query
row of the request sees key n of the tile. :func:`list_tiles` then lists the tiles whose word is not zero, in order.
The attention kernel walks that list like a page table. Tiles that no query sees (left padding, the unused capacity of a
static cache) are never loaded. Within a tile, a key that no query sees is not loaded either, so the contents of its row
cannot reach the result.

``work`` is int64 [6,B,capacity] with capacity = cdiv(T, BLOCK_N). Planes SEEN and REAL hold words. FULL tells whether
every query row has a real key in the tile. TILE and WORD hold the list, and the first entry of COUNT holds its length.

Most models hide keys with a large finite additive mask. A key is *real* if its mask is above half the dtype's lowest
value. If a query row sees a real key, keys that are not real have a weight of exactly 0. But if a query row sees no
real key, softmax gives weight to other keys. REAL has the bits of the real keys. SEEN has the bits of all keys
whose mask is not minus infinity. A request uses REAL if some tile has a real key for every query row, otherwise SEEN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: a running maximum that starts here never makes inf - inf

SEEN = tl.constexpr(0)
REAL = tl.constexpr(1)
FULL = tl.constexpr(2)
TILE = tl.constexpr(3)
WORD = tl.constexpr(4)
COUNT = tl.constexpr(5)


@triton.jit
def key_range(lengths, b, S, T, window, WINDOW: tl.constexpr):
    """Return ``(length, begin)``: queries of request b see only keys in [begin, length). T: the capacity in tokens."""
    length = T
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), T)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - S - window + 1, 0)
    return length, begin


@triton.jit
def listed_tile(work, plane, valid):
    """Return ``(tile, word)`` of the list entry at ``work``: the tile's number and the bits of its visible keys."""
    return tl.load(work + TILE * plane, mask=valid, other=0), tl.load(work + WORD * plane, mask=valid, other=0)


@triton.jit
def keys_of(tile, length, begin, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return ``(n, seen)``: the keys of a tile [BLOCK_N], and which of them some row of the request sees."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = n < length
    if WINDOW:
        seen = seen & (n >= begin)
    return n, seen


@triton.jit
def tile_rows(
    x,
    table,
    start,
    n,
    length,
    stride_page,
    stride_row,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Return ``(pointer, offsets)``: the rows of ``x`` for tokens ``n`` [BLOCK_N] are at ``pointer + offsets``.

    ``x`` points to the request's rows (PAGE = 0) or to the first page. Token numbers start at ``start``; with LISTED,
    ``n`` holds places (kernels/triton/lists_triton.py). Offsets of pages are 64-bit. Offsets inside a request or a page
    are 64-bit only with WIDE (if they could exceed 2^31), because 64-bit offsets need more registers. ``table`` is read
    only for tokens below ``length``, so later entries may be anything.
    """
    if PAGE == 0:
        if WIDE:
            n = n.to(tl.int64)
        return x, n * stride_row
    elif not LISTED and PAGE % BLOCK_N == 0:  # one page holds the whole tile: one scalar look-up
        page = tl.load(table + start // PAGE).to(tl.int64)
        slot = n % PAGE
        if WIDE:
            slot = slot.to(tl.int64)
        return x + page * stride_page, slot * stride_row
    else:
        page = n // PAGE
        if not LISTED:
            page = tl.load(table + page, mask=n < length, other=0)
        slot = n % PAGE
        if WIDE:
            slot = slot.to(tl.int64)
        return x, page.to(tl.int64) * stride_page + slot * stride_row


@triton.jit
def scan_mask(
    mask,
    lengths,
    work,
    mask_b,
    mask_h,
    mask_s,
    mask_t,
    HM,  # HM, SM: numbers of heads and query tokens to scan; 1 if all of them see the same keys
    SM,
    S,
    T,
    window,
    capacity,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    HIDDEN: tl.constexpr,  # for an additive mask: a key is real if its mask is above this
):
    """Write planes SEEN, REAL and FULL of GROUP tiles; grid (cdiv(capacity, GROUP), B)."""
    b = tl.program_id(1)
    tile = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    n = (tile * BLOCK_N)[:, None] + tl.arange(0, BLOCK_N)[None, :]  # [GROUP,BLOCK_N]
    length, begin = key_range(lengths, b, S, T, window, WINDOW)
    inside = (n < length) & (n >= begin)
    some_seen = tl.zeros([GROUP, BLOCK_N], tl.int32)
    some_real = tl.zeros([GROUP, BLOCK_N], tl.int32)
    full = tl.full([GROUP], 1, tl.int32)
    mask += b.to(tl.int64) * mask_b
    for row in range(HM * SM):
        s = row % SM
        p_mask = mask + (row // SM).to(tl.int64) * mask_h + s.to(tl.int64) * mask_s
        if mask.dtype.element_ty == tl.uint8:
            seen = tl.load(p_mask + n.to(tl.int64) * mask_t, mask=inside, other=0) != 0
            real = seen
        else:
            value = tl.load(p_mask + n.to(tl.int64) * mask_t, mask=inside, other=float("-inf")).to(tl.float32)
            seen = value != float("-inf")
            real = (value > HIDDEN) | (value != value)
        if CAUSAL:
            seen &= n <= length - S + s
            real &= n <= length - S + s
        if WINDOW:
            seen &= n > length - S + s - window
            real &= n > length - S + s - window
        some_seen |= seen.to(tl.int32)
        some_real |= real.to(tl.int32)
        full &= tl.max(real.to(tl.int32), 1)
    bit = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    plane = tl.num_programs(1).to(tl.int64) * capacity
    p_work = work + b.to(tl.int64) * capacity + tile
    fits = tile < capacity
    tl.store(p_work + SEEN * plane, tl.sum(some_seen.to(tl.int64) << bit, 1), mask=fits)
    tl.store(p_work + REAL * plane, tl.sum(some_real.to(tl.int64) << bit, 1), mask=fits)
    tl.store(p_work + FULL * plane, full.to(tl.int64), mask=fits)


@triton.jit
def list_tiles(work, capacity, BLOCK: tl.constexpr):
    """Write planes TILE, WORD and COUNT from the planes of :func:`scan_mask`, BLOCK tiles at a time; grid (B,)."""
    b = tl.program_id(0)
    plane = tl.num_programs(0).to(tl.int64) * capacity
    p_work = work + b.to(tl.int64) * capacity
    lane = tl.arange(0, BLOCK)
    full = tl.zeros([BLOCK], tl.int64)
    for first in range(0, capacity, BLOCK):
        tile = first + lane
        full |= tl.load(p_work + FULL * plane + tile, mask=tile < capacity, other=0)
    source = tl.where(tl.max(full, 0) > 0, REAL, SEEN).to(tl.int64) * plane
    count = tl.zeros([], tl.int32)
    for first in range(0, capacity, BLOCK):
        tile = first + lane
        word = tl.load(p_work + source + tile, mask=tile < capacity, other=0)
        keep = word != 0
        place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(p_work + TILE * plane + place, tile.to(tl.int64), mask=keep)
        tl.store(p_work + WORD * plane + place, word, mask=keep)
        count += tl.sum(keep.to(tl.int32), 0)
    tl.store(p_work + COUNT * plane, count.to(tl.int64))
