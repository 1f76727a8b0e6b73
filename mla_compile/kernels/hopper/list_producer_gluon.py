"""The producer of the Hopper kernel for index lists (list_gluon.py): looks up places, then copies rows by cp.async.

TMA gathers rows only from Blackwell on, so the four warps of the producer copy the rows themselves, 16 bytes at a time.
Up to three look-ups (entry, mask, block table) tell where the row of an entry is, and whether the query token sees the
row. So the producer first writes the places of its split to scratch. For each block it also writes 64 bits, with
which the consumers hide scores. Several CTAs may write the same entry, but they write equal values. Each CTA reads only
what it wrote itself, after the barrier LIST_READY.

A *place* is the number of a row in the cache: the token, or ``page * LIST_PAGE + slot``. The place is -1 if the query
token does not see the key. The row of such a key is not read. The copy writes zeros instead, so that no row has to be
cleared before it is used as a value. If pages are consecutive in memory, they are treated as a contiguous cache, and
PAGE is 0.

cp.async writes through the generic proxy, like ordinary stores. A free stage needs no fence before it is filled: the
tensor cores finished reading the stage before it was released, and threads stored the P that overlays the rope part.
``_arrived`` in scores_gluon.py explains what the tensor cores need before they read the copied rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_compile.kernels.hopper.producer_gluon import BN, FREE, HALF, NARROW, ROPE, TILE, blocks_of, length_of
from mla_compile.kernels.hopper.rows_gluon import ROWS

load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # as in cluster_gluon.py

THREADS = gl.constexpr(128)  # of the producer. Each arrives at a part's barrier when its own copies have landed
LIST_READY = gl.constexpr(15)  # barrier: places and bits have been written
GROUP = gl.constexpr(16)  # blocks that are looked up at a time: 8 entries per thread


@gluon.jit
def token_of(H):
    """Return this CTA's (query token, block of 64 heads), from the grid's first axis, which may exceed 65535."""
    blocks = (H + ROWS - 1) // ROWS
    return gl.program_id(0) // blocks, gl.program_id(0) % blocks


@gluon.jit
def _look_up(indices, table, mask, places, words, lo, hi, entries, length, own, lower, mask_t,
             LIST_PAGE: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Write places and bits of blocks lo..hi of a query token's list.

    ``own`` is the position of the query token, ``lower`` the first key of its window, or None.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, L)), 0)
    for start in range(lo, hi, GROUP):
        block = start + gl.arange(0, GROUP, gl.SliceLayout(1, L))
        i = gl.expand_dims(block * BN, 1) + c
        n = gl.load(indices + i, mask=i < gl.minimum(hi * BN, entries), other=-1)
        seen = (n >= 0) & (n < length)
        if CAUSAL:
            seen = seen & (n <= own)
        if lower is not None:
            seen = seen & (n >= lower)
        if mask is not None:
            seen = seen & (gl.load(mask + n.to(gl.int64) * mask_t, mask=seen, other=0) != 0)
        if LIST_PAGE > 0:
            n = gl.load(table + n // LIST_PAGE, mask=seen, other=0) * LIST_PAGE + n % LIST_PAGE
        gl.store(places + i, gl.where(seen, n, -1), mask=i < hi * BN)
        bit = seen.to(gl.int32) << (c & 31)
        low = gl.sum(gl.where(c < 32, bit, 0), 1)
        high = gl.sum(gl.where(c < 32, 0, bit), 1)
        gl.store(words + 2 * block, low, mask=block < hi)
        gl.store(words + 2 * block + 1, high, mask=block < hi)


@gluon.jit
def looked_up(token, indices, table, seq_lens, mask, places, words, table_b, mask_b, mask_s, mask_t, indices_b,
              indices_s, entries, reach, T, S, least, bars, LIST_PAGE: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Look up this CTA's split of a token's list, then signal LIST_READY. Return (first block, end block, places).

    Writes ``places`` int32 [tokens,blocks,64] and ``words`` int32 [tokens,blocks,2], blocks = cdiv(entries, 64).
    """
    lo, hi, blocks = blocks_of(None, None, 0, entries, None, token, token, 0, token, 0, least)
    b = token // S
    s = token % S
    length = length_of(seq_lens, b, T)
    places += token.to(gl.int64) * blocks * BN
    words += token.to(gl.int64) * blocks * 2
    indices += b.to(gl.int64) * indices_b + s.to(gl.int64) * indices_s
    if LIST_PAGE > 0:
        table += b.to(gl.int64) * table_b
    if mask is not None:
        mask += b.to(gl.int64) * mask_b + s.to(gl.int64) * mask_s
    lower = None
    if reach is not None:
        lower = length - reach + s
    _look_up(indices, table, mask, places, words, lo, hi, entries, length, length - S + s, lower, mask_t, LIST_PAGE,
             CAUSAL)  # fmt: skip
    # One thread arrives for all. The compiler places a barrier of the four warps before the arrival
    # (checked by benchmarks/gpu/ptx.py).
    mbarrier.arrive(bars.index(LIST_READY))
    mbarrier.wait(bars.index(LIST_READY), 0)
    return lo, hi, places


@gluon.jit
def _copy(x, place, stride_page, stride_row, tile, bar, WIDTH: gl.constexpr, PAGE: gl.constexpr, L: gl.constexpr):
    """Copy WIDTH columns of the rows at 64 places to tile [64,WIDTH], asynchronously; zeros if a place is -1.

    Each thread arrives at bar when its copies have landed. Strides are multiples of 8 elements.
    """
    seen = gl.expand_dims(place >= 0, 1)
    place = gl.maximum(place, 0)
    row = stride_row // 8 * 8  # shows the compiler that 8 divides the stride
    if PAGE == 0:
        offset = place.to(gl.int64) * row
    else:
        offset = (place // PAGE).to(gl.int64) * (stride_page // 8 * 8) + (place % PAGE).to(gl.int64) * row
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    load_rows(tile, x + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)), mask=seen)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def list_producer(latent, rope, indices, table, seq_lens, mask, places, words, latent_b, latent_t, rope_b, rope_t,
                  table_b, mask_b, mask_s, mask_t, indices_b, indices_s, entries, reach, T, S, H, least, tiles, narrow,
                  bars, PAGE: gl.constexpr, LIST_PAGE: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Fill the stages with the rows that this CTA's split of a list names, 64 at a time, in order."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 16 bytes per thread, for 16 rows at a time
    token, _ = token_of(H)
    if LIST_PAGE == 0:
        b = token // S
        latent += b.to(gl.int64) * (latent_b // 8 * 8)
        if rope is not None:
            rope += b.to(gl.int64) * (rope_b // 8 * 8)
    lo, hi, places = looked_up(token, indices, table, seq_lens, mask, places, words, table_b, mask_b, mask_s, mask_t,
                               indices_b, indices_s, entries, reach, T, S, least, bars, LIST_PAGE, CAUSAL)  # fmt: skip
    for block in range(lo, hi):
        stage = (block - lo) % 2
        # See producer_gluon.py: the first loads find the stage free.
        phase = ((block - lo) // 2 & 1) ^ 1
        # Loaded now, so that the load overlaps the wait for a free stage.
        place = gl.load(places + block * BN + gl.arange(0, BN, gl.SliceLayout(1, L)))
        bar = 3 * stage
        wide = TILE + 2 * stage
        mbarrier.wait(bars.index(FREE + 2 * stage), phase)
        _copy(latent, place, latent_b, latent_t, tiles.index(wide), bars.index(bar), HALF, PAGE, L)
        mbarrier.wait(bars.index(FREE + 2 * stage + 1), phase)
        _copy(latent + HALF, place, latent_b, latent_t, tiles.index(wide + 1), bars.index(bar + 1), HALF, PAGE, L)
        if rope is not None:
            _copy(rope, place, rope_b, rope_t, narrow.index(NARROW + stage), bars.index(bar + 2), ROPE, PAGE, L)
