"""The producer of the Hopper kernel for float8 rows (fp8_gluon.py): ordinary loads, conversion, stores into the stage.

The products are in half precision, and shared memory is full with two stages of that. So float8 never lies in it: the
four warps of the producer load pieces of 64 rows and 64 columns into registers, 16 bytes at a time, convert them and
write the swizzled tiles themselves. ``AHEAD`` pieces are under way at any time, those of the next block included, while
the producer converts, and while it waits for a free stage. Four values are one int32 until then, because a value that
a loop carries has a register for itself, however short it is.

A row lies at a *place*: the token, or ``page * TABLE_PAGE + slot``; -1 where nobody sees it (past the length, before
the window, hidden by a mask), and then it is not read and becomes zeros, so that nothing has to be cleaned before it is
used as a value. A block table is read for rows that are seen only. Where pages lie behind each other the cache is one
piece, and PAGE is 0, which spares the producer registers.

e4m3 is exact in half precision, and rows times their scales would not be: scales are the consumers'. One that all rows
have in common is a factor of the scores and of the result; those by token lie beside the stage, in a line of ``stats``.

The stores are ordinary ones, and the tensor cores read by another proxy: each thread fences its own, and one arrives
for all behind a barrier of the four warps, as the consumers do with P. So who waits for the stage needs no fence. A
stage may be filled as soon as it is free, see list_producer_gluon.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_compile.kernels.hopper.block_gluon import bits, keys
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

AHEAD = gl.constexpr(4)  # pieces whose loads are under way: 16 KB, 8 registers of each thread for each
COLUMNS = gl.constexpr(64)  # of a piece
WORD = gl.constexpr(4)  # float8 values of an int32
IN_HALF = gl.constexpr(4)  # pieces of half the latent
PIECES = gl.constexpr(9)  # of a block: two halves and the rope part


@gluon.jit
def _places(work, plane, table_row, i, hi, length, begin, TABLE_PAGE: gl.constexpr, L: gl.constexpr):
    """Places [64] of the rows of block i; a block from ``hi`` on has none."""
    r = gl.arange(0, BN, gl.SliceLayout(1, L))
    listed = gl.minimum(i, hi - 1)  # where a list ends, too
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
    """Where the rows at 64 places begin."""
    place = gl.maximum(place, 0)
    if PAGE == 0:
        return place.to(gl.int64) * stride_row
    else:
        return (place // PAGE).to(gl.int64) * stride_page + (place % PAGE).to(gl.int64) * stride_row


@gluon.jit
def _words(stride):
    """A stride of rows in int32; a multiple of 16 bytes, and divided so that the compiler knows it."""
    return stride // 16 * (16 // WORD)


@gluon.jit
def _piece(latent, rope, place, latent_b, latent_t, rope_b, rope_t, PIECE: gl.constexpr, PAGE: gl.constexpr,
           L: gl.constexpr):  # fmt: skip
    """Issues the loads of a piece of the rows at 64 places, int32 [64,16]; -1: zeros."""
    if PIECE < 2 * IN_HALF:
        x = latent + PIECE * (COLUMNS // WORD)
        row = _offsets(place, _words(latent_b), _words(latent_t), PAGE)
    else:
        x = rope
        row = _offsets(place, _words(rope_b), _words(rope_t), PAGE)
    column = gl.arange(0, COLUMNS // WORD, gl.SliceLayout(0, L))
    cells = gl.expand_dims(row, 1) + gl.expand_dims(column, 0)
    return gl.load(x + cells, mask=gl.expand_dims(place >= 0, 1), other=0)


@gluon.jit
def _values(x, BYTE: gl.constexpr):
    """The float8 values that are one of the four bytes of x [64,16], as float32.

    From there two neighbours become a word of bfloat16 in one instruction; from float16 each takes a slow one.
    """
    return (x >> (8 * BYTE)).to(gl.int8).to(gl.float8e4nv, bitcast=True).to(gl.float32)


@gluon.jit
def _convert(x, tile):
    """A piece, int32 [64,16], into tile [64,64]."""
    x = gl.join(gl.join(_values(x, 0), _values(x, 2)), gl.join(_values(x, 1), _values(x, 3)))
    tile.store(gl.reshape(x, [BN, COLUMNS]).to(tile.dtype))


@gluon.jit
def _scales(kv_scale, place, scale_b, scale_t, PAGE: gl.constexpr):
    """The scales of the rows at 64 places; 0 where nobody sees one."""
    return gl.load(kv_scale + _offsets(place, scale_b, scale_t, PAGE), mask=place >= 0, other=0.0)


@gluon.jit
def fp8_producer(latent, rope, kv_scale, table, seq_lens, items, work, reach, latent_b, latent_t, rope_b, rope_t,
                 scale_b, scale_t, table_stride, work_b, plane, T, B, least, tiles, narrow, stats, bars,
                 PAGE: gl.constexpr, TABLE_PAGE: gl.constexpr):  # fmt: skip
    """Fills the stages with the blocks of this CTA's items, in order; ``kv_scale``: the scales by token, or None."""
    # 16 columns for each thread, of 32 rows at a time: no two threads of a store meet in a bank.
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    used = 0  # a bit for each stage: whether it was used an odd number of times
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
        latents = latent
        ropes = rope
        scales = kv_scale
        if TABLE_PAGE > 0:
            table_row = table + b.to(gl.int64) * table_stride
        else:
            latents = latent + b.to(gl.int64) * _words(latent_b)
            ropes = rope + b.to(gl.int64) * _words(rope_b)
            if kv_scale is not None:
                scales = kv_scale + b.to(gl.int64) * scale_b
        place = _places(listed, plane, table_row, lo, hi, length, begin, TABLE_PAGE, L)
        if kv_scale is not None:
            factor = _scales(scales, place, scale_b, scale_t, PAGE)
        ahead = ()
        for i in gl.static_range(AHEAD):
            ahead += (_piece(latents, ropes, place, latent_b, latent_t, rope_b, rope_t, i, PAGE, L),)
        for block in range(lo, hi):
            stage = (block - lo) % 2
            # See producer_gluon.py: the first blocks find the stage free.
            phase = (used >> stage & 1) ^ 1
            wide = TILE + 2 * stage
            for i in gl.static_range(PIECES):
                if i == 0:
                    mbarrier.wait(bars.index(FREE + 2 * stage), phase)
                    if kv_scale is not None:
                        stats.index(FACTOR + stage).store(factor)
                if i == IN_HALF:
                    mbarrier.wait(bars.index(FREE + 2 * stage + 1), phase)
                if i < 2 * IN_HALF:
                    _convert(ahead[0], tiles.index(wide + i // IN_HALF).slice(i % IN_HALF * COLUMNS, COLUMNS, 1))
                else:
                    _convert(ahead[0], narrow.index(NARROW + stage))
                new = _piece(latents, ropes, place, latent_b, latent_t, rope_b, rope_t, (i + AHEAD) % PIECES, PAGE,
                             L)  # fmt: skip
                ahead = ahead[1:] + (new,)  # noqa: RUF005  what the compiler takes
                if i + AHEAD == PIECES - 1:  # what is loaded next is of the next block
                    place = _places(listed, plane, table_row, block + 1, hi, length, begin, TABLE_PAGE, L)
                    if kv_scale is not None:
                        factor = _scales(scales, place, scale_b, scale_t, PAGE)
                if i % IN_HALF == IN_HALF - 1 or i == PIECES - 1:
                    fence_async_shared()
                    mbarrier.arrive(bars.index(3 * stage + i // IN_HALF))
            used = used ^ (1 + stage)
