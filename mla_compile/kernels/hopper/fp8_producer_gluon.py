"""The producer of the Hopper kernel for float8 rows (fp8_gluon.py): ordinary loads, conversion, stores into the stage.

The products are in half precision. Two stages in half precision fill the shared memory, which leaves no room for float8
rows. So the four warps of the producer load *pieces* of 64 rows by 64 bytes into registers, 16 bytes at a time, convert
the pieces, and write the swizzled tiles. ``AHEAD`` pieces are always in flight, even across block boundaries and while
the producer waits for a free stage. Four float8 values stay in one int32 until they are converted, because each value
that a loop carries occupies a whole register.

A *place* is the number of a row in the cache: the token, or ``page * TABLE_PAGE + slot``. The place is -1 if no query
sees the row (it is past the length, before the window, or hidden by a mask). Such a row is not read. Zeros replace it,
so that no row has to be cleared before it is used as a value. The block table is read only for visible rows. If pages
are consecutive in memory, they are treated as a contiguous cache. PAGE is then 0, which saves registers. Places of
index lists are looked up first, as for rows in half precision (list_producer_gluon.py).

Scales have two forms:

* If rope is float8, too, a scale applies to a whole row. The consumers apply the scales, because e4m3 values are exact
  in half precision, but scaled values are not. One scale for all rows multiplies the scores and the result. Per-token
  scales are passed to the consumers in a row of ``stats``.
* If rope is in half precision, rope has no scale, so the latent's scales cannot multiply the scores. GROUPS is then the
  number of groups of latent columns (at least 1), each with its own scale. The producer multiplies in float32 and
  rounds once, to bfloat16. (FlashMLA does so, too, with the 656-byte rows of DeepSeek-V3.2.) The rope part is stored
  unchanged, from two pieces of 32 columns.

The stores go through the generic proxy, but the tensor cores read through the async proxy. So each thread fences its
own stores. After a barrier of the four warps, one thread arrives for all threads. Consumers therefore need no fence. A
free stage may be filled without a fence, see list_producer_gluon.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_compile.kernels.hopper.block_gluon import bits, keys
from mla_compile.kernels.hopper.list_producer_gluon import looked_up, token_of
from mla_compile.kernels.hopper.producer_gluon import (
    BN,
    FACTOR,
    FREE,
    NARROW,
    TILE,
    blocks_of,
    length_of,
    place_of,
    requests_of,
)

AHEAD = gl.constexpr(4)  # pieces in flight: 16 KB in total, 8 registers per thread for each piece
COLUMNS = gl.constexpr(64)  # columns of a float8 piece
WORD = gl.constexpr(4)  # bytes of an int32
IN_HALF = gl.constexpr(4)  # pieces in half the latent


@gluon.jit
def _places(places, work, plane, table_row, i, hi, length, begin, TABLE_PAGE: gl.constexpr, L: gl.constexpr):
    """Return the places [64] of block i's rows; -1 for blocks from ``hi`` on. ``places``: of an index list, or None."""
    r = gl.arange(0, BN, gl.SliceLayout(1, L))
    if places is not None:
        return gl.load(places + i * BN + r, mask=r < (hi - i) * BN, other=-1)
    else:
        listed = gl.minimum(i, hi - 1)  # a list of tiles may end at ``hi``, so entry ``hi`` must not be read
        n = place_of(work, plane, listed) * BN + r
        seen = (n < length) & (i < hi)
        if begin is not None:
            seen = seen & (n >= begin)
        if work is not None:
            low, high = keys(work, plane, listed, False)
            seen = seen & bits(low, high, r)
        if TABLE_PAGE > 0:
            n = gl.load(table_row + n // TABLE_PAGE, mask=seen, other=0) * TABLE_PAGE + n % TABLE_PAGE
        return gl.where(seen, n, -1)


@gluon.jit
def _offsets(place, stride_page, stride_row, PAGE: gl.constexpr):
    """Return the offsets of the rows at 64 places."""
    place = gl.maximum(place, 0)
    if PAGE == 0:
        return place.to(gl.int64) * stride_row
    else:
        return (place // PAGE).to(gl.int64) * stride_page + (place % PAGE).to(gl.int64) * stride_row


@gluon.jit
def _words(stride, BYTES: gl.constexpr):
    """Convert a stride to int32 words. The division shows the compiler that 16 bytes divide the stride."""
    return stride // (16 // BYTES) * (16 // WORD)


@gluon.jit
def _piece(latent, rope, place, latent_b, latent_t, rope_b, rope_t, PIECE: gl.constexpr, ROPE_BYTES: gl.constexpr,
           PAGE: gl.constexpr, L: gl.constexpr):  # fmt: skip
    """Issue the loads of one piece, int32 [64,16], of the rows at 64 places; zeros if a place is -1."""
    if PIECE < 2 * IN_HALF:
        x = latent + PIECE * (COLUMNS // WORD)
        row = _offsets(place, _words(latent_b, 1), _words(latent_t, 1), PAGE)
    else:
        x = rope + (PIECE - 2 * IN_HALF) * (COLUMNS // WORD)
        row = _offsets(place, _words(rope_b, ROPE_BYTES), _words(rope_t, ROPE_BYTES), PAGE)
    column = gl.arange(0, COLUMNS // WORD, gl.SliceLayout(0, L))
    cells = gl.expand_dims(row, 1) + gl.expand_dims(column, 0)
    return gl.load(x + cells, mask=gl.expand_dims(place >= 0, 1), other=0)


@gluon.jit
def _values(x, factor, BYTE: gl.constexpr):
    """Return the float8 values in byte BYTE of int32 x [64,16] as float32, multiplied by the rows' factor if given.

    They are not in float16, because only float32 values have a fast conversion to bfloat16.
    """
    x = (x >> (8 * BYTE)).to(gl.int8).to(gl.float8e4nv, bitcast=True).to(gl.float32)
    if factor is not None:
        x = x * gl.expand_dims(factor, 1)
    return x


@gluon.jit
def _convert(x, factor, tile):
    """Convert a piece, int32 [64,16], into tile [64,64]."""
    even = gl.join(_values(x, factor, 0), _values(x, factor, 2))
    odd = gl.join(_values(x, factor, 1), _values(x, factor, 3))
    tile.store(gl.reshape(gl.join(even, odd), [BN, COLUMNS]).to(tile.dtype))


@gluon.jit
def _store_halves(left, right, tile):
    """Store rope's two half-precision pieces, int32 [64,16] each, into tile [64,64] unchanged."""
    x = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [BN, 2 * COLUMNS // WORD])
    x = gl.join(x.to(gl.int16), (x >> 16).to(gl.int16))
    tile.store(gl.reshape(x, [BN, COLUMNS]).to(tile.dtype, bitcast=True))


@gluon.jit
def _scales(kv_scale, place, scale_b, scale_t, PAGE: gl.constexpr):
    """Return the scales of the rows at 64 places; 0 for rows that no query sees."""
    return gl.load(kv_scale + _offsets(place, scale_b, scale_t, PAGE), mask=place >= 0, other=0.0)


@gluon.jit
def _factor(kv_scale, place, scale_b, scale_t, scale_g, before, PIECE: gl.constexpr, GROUPS: gl.constexpr,
            PAGE: gl.constexpr):  # fmt: skip
    """Return a piece's scales for the rows at 64 places. ``before``: the scales of the previous piece, or None."""
    FIRST: gl.constexpr = PIECE * GROUPS % (2 * IN_HALF) == 0  # first piece of a group
    if FIRST and PIECE < 2 * IN_HALF:
        for _ in gl.static_range(PIECE * GROUPS // (2 * IN_HALF)):
            kv_scale += scale_g  # added one by one: a multiple of an int32 may overflow
        return _scales(kv_scale, place, scale_b, scale_t, PAGE)
    else:
        return before  # the previous piece is in the same group; unused for rope


@gluon.jit
def _fill(latent, rope, kv_scale, places, work, plane, table_row, b, lo, hi, length, begin, used, latent_b, latent_t,
          rope_b, rope_t, scale_b, scale_t, scale_g, tiles, narrow, stats, bars, GROUPS: gl.constexpr,
          PAGE: gl.constexpr, TABLE_PAGE: gl.constexpr):  # fmt: skip
    """Fill the stages with blocks lo..hi of request b. Return the new ``used`` (see fp8_producer)."""
    # 16 columns per thread, 32 rows at a time. The threads of a store then access different banks. (For rope in half
    # precision, the 16 bytes of a thread are only 8 columns, and two threads share a bank.)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE_BYTES: gl.constexpr = 2 if GROUPS > 0 else 1
    PIECES: gl.constexpr = 2 * IN_HALF + ROPE_BYTES  # pieces of a block: two halves and the rope part
    BESIDE: gl.constexpr = kv_scale is not None and GROUPS == 0  # scales are stored beside the stage
    latents = latent
    ropes = rope
    scales = kv_scale
    if TABLE_PAGE == 0:
        latents = latent + b.to(gl.int64) * _words(latent_b, 1)
        ropes = rope + b.to(gl.int64) * _words(rope_b, ROPE_BYTES)
        if kv_scale is not None:
            scales = kv_scale + b.to(gl.int64) * scale_b
    place = _places(places, work, plane, table_row, lo, hi, length, begin, TABLE_PAGE, L)
    if BESIDE:
        factor = _scales(scales, place, scale_b, scale_t, PAGE)
    ahead = ()
    factors = ()  # factors of the pieces in flight
    for i in gl.static_range(AHEAD):
        ahead += (_piece(latents, ropes, place, latent_b, latent_t, rope_b, rope_t, i, ROPE_BYTES, PAGE, L),)
        if GROUPS > 0:
            before = None if i == 0 else factors[-1]
            factors += (_factor(scales, place, scale_b, scale_t, scale_g, before, i, GROUPS, PAGE),)
    for block in range(lo, hi):
        stage = (block - lo) % 2
        # See producer_gluon.py: the first blocks find the stage free.
        phase = (used >> stage & 1) ^ 1
        wide = TILE + 2 * stage
        for i in gl.static_range(PIECES):
            if i == 0:
                mbarrier.wait(bars.index(FREE + 2 * stage), phase)
                if BESIDE:
                    stats.index(FACTOR + stage).store(factor)
            if i == IN_HALF:
                mbarrier.wait(bars.index(FREE + 2 * stage + 1), phase)
            if i < 2 * IN_HALF:
                tile = tiles.index(wide + i // IN_HALF).slice(i % IN_HALF * COLUMNS, COLUMNS, 1)
                if GROUPS > 0:
                    _convert(ahead[0], factors[0], tile)
                else:
                    _convert(ahead[0], None, tile)
            elif GROUPS == 0:
                _convert(ahead[0], None, narrow.index(NARROW + stage))
            elif i == 2 * IN_HALF:  # stored together with the last piece
                _store_halves(ahead[0], ahead[1], narrow.index(NARROW + stage))
            new = _piece(latents, ropes, place, latent_b, latent_t, rope_b, rope_t, (i + AHEAD) % PIECES, ROPE_BYTES,
                         PAGE, L)  # fmt: skip
            ahead = ahead[1:] + (new,)  # noqa: RUF005  the compiler accepts only this form
            if GROUPS > 0:
                new = _factor(scales, place, scale_b, scale_t, scale_g, factors[-1], (i + AHEAD) % PIECES, GROUPS,
                              PAGE)  # fmt: skip
                factors = factors[1:] + (new,)  # noqa: RUF005
            if i + AHEAD == PIECES - 1:  # the next load belongs to the next block
                place = _places(places, work, plane, table_row, block + 1, hi, length, begin, TABLE_PAGE, L)
                if BESIDE:
                    factor = _scales(scales, place, scale_b, scale_t, PAGE)
            if i % IN_HALF == IN_HALF - 1 or i == 2 * IN_HALF:
                fence_async_shared()
                mbarrier.arrive(bars.index(3 * stage + i // IN_HALF))
        used = used ^ (1 + stage)
    return used


@gluon.jit
def fp8_producer(latent, rope, kv_scale, indices, table, seq_lens, mask, places, items, work, reach, latent_b, latent_t,
                 rope_b, rope_t, scale_b, scale_t, scale_g, table_b, mask_b, mask_s, mask_t, indices_b, indices_s,
                 entries, work_b, plane, T, B, S, H, least, tiles, narrow, stats, bars, GROUPS: gl.constexpr,
                 PAGE: gl.constexpr, TABLE_PAGE: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Fill the stages with the blocks of this CTA's items, in order.

    ``kv_scale`` holds scales by token and group, or is None. If GROUPS > 0, each of GROUPS groups of latent columns has
    its own scale, and rope is in half precision. If GROUPS is 0, rope is float8, and scales apply to whole rows. With
    ``indices``, the only item is this CTA's split of a list, and the bits of the split are written to ``work``.
    """
    used = 0  # a bit per stage: whether it was used an odd number of times
    if indices is not None:
        token, _ = token_of(H)
        lo, hi, listed = looked_up(token, indices, table, seq_lens, mask, places, work, table_b, mask_b, mask_s, mask_t,
                                   indices_b, indices_s, entries, reach, T, S, least, bars, TABLE_PAGE,
                                   CAUSAL)  # fmt: skip
        _fill(latent, rope, kv_scale, listed, None, 0, None, token // S, lo, hi, 0, None, used, latent_b, latent_t,
              rope_b, rope_t, scale_b, scale_t, scale_g, tiles, narrow, stats, bars, GROUPS, PAGE,
              TABLE_PAGE)  # fmt: skip
    else:
        b0, b1, t0, t1 = requests_of(items, B)
        for b in range(b0, b1):
            length = length_of(seq_lens, b, T)
            begin = reach
            if reach is not None:
                begin = gl.maximum(length - reach, 0)
            listed = work
            if work is not None:
                listed = work + 2 * b.to(gl.int64) * work_b
            lo, hi, _ = blocks_of(items, listed, plane, length, begin, b, b0, t0, b1, t1, least)
            table_row = table
            if TABLE_PAGE > 0:
                table_row = table + b.to(gl.int64) * table_b
            used = _fill(latent, rope, kv_scale, None, listed, plane, table_row, b, lo, hi, length, begin, used,
                         latent_b, latent_t, rope_b, rope_t, scale_b, scale_t, scale_g, tiles, narrow, stats, bars,
                         GROUPS, PAGE, TABLE_PAGE)  # fmt: skip
