"""The producer of the Hopper kernel (decode_gluon.py): the blocks that a CTA walks, and the TMA copies that bring them.

An *item* is a run of blocks of one request: one per CTA on the split grid, several if a schedule
(kernels/triton/schedule.py) is given. With a mask, the blocks of a request are those in its list of visible tiles
(kernels/triton/tiles_triton.py); other blocks are never fetched. With a window, they start with the first block that
some query token sees. For rows past a request's length, TMA fills rows outside the tensor with zeros. A page past the
length is never looked up; its box is placed outside the tensor. Pages of a window's first block that lie before the
window are looked up, too: their entries in the block table may name any page; one outside the cache gives zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_compile.kernels.hopper.cluster_gluon import expect, joint, load_box, reshaped, rows_alike

BN = gl.constexpr(64)  # cache rows per block; P overlays the rope part, so it must have the same 64 x 64 shape
HALF = gl.constexpr(256)  # latent columns per consumer; the latent is 2 * HALF wide
ROPE = gl.constexpr(64)

# Wide tiles [64,256]: 0 and 1 for the query, ``2 + 2 * stage + half`` for the cache. Narrow tiles [64,64]: 0 for the
# query, ``1 + stage`` for the cache and then P. Without a rotary part, narrow tile 0 and rope's barriers are not used.
TILE = gl.constexpr(2)
NARROW = gl.constexpr(1)
# Planes of a mask's list, as kernels/triton/tiles_triton.py writes them: tile numbers, visible keys, the count.
LIST_TILE = gl.constexpr(3)
LIST_WORD = gl.constexpr(4)
LIST_COUNT = gl.constexpr(5)
# FACTOR + stage: the row of the float32 exchange that holds scales by token, after the consumers' rows.
FACTOR = gl.constexpr(6)
# Barriers: ``3 * stage + part`` for "loaded" (parts 0 and 1 are halves, 2 is rope), ``FREE + 2 * stage + half`` for
# "free again".
FREE = gl.constexpr(6)
# If a half arrives in four parts, the second to fourth have the barriers from PARTS_READY + 3 * (2 * stage + half) on.
PARTS_READY = gl.constexpr(15)


@gluon.jit
def loaded(stage, half, part: gl.constexpr):
    """The barrier of a part of a stage's half; the barriers of later parts follow all others."""
    if part == 0:
        return 3 * stage + half
    else:
        return PARTS_READY - 1 + 3 * (2 * stage + half) + part


@gluon.jit
def length_of(seq_lens, b, T):
    """Cache rows of request b; a length beyond the capacity T is clamped."""
    length = T
    if seq_lens is not None:
        length = gl.minimum(gl.maximum(gl.load(seq_lens + b), 0), T)
    return length


@gluon.jit
def requests_of(items, B):
    """(first request, one past the last, first block in the first request, end block in the last) of this CTA."""
    if items is None:
        return gl.program_id(2), gl.program_id(2) + 1, 0, 0
    else:
        p = items + 2 * gl.program_id(1)
        end = gl.load(p + 2)
        t1 = gl.load(p + 3)
        return gl.load(p), gl.minimum(end + (t1 > 0).to(gl.int32), B), gl.load(p + 1), t1


@gluon.jit
def place_of(work, plane, i):
    """The tile that is block i of a request: tile i, or the i-th of its list (low half of each entry first)."""
    if work is None:
        return i
    else:
        return gl.load(work + 2 * (LIST_TILE * plane.to(gl.int64) + i))


@gluon.jit
def blocks_of(items, work, plane, length, begin, b, b0, t0, b1, t1, least):
    """Blocks lo..hi of request b for this CTA, and the request's number of blocks.

    Without a list of tiles, blocks are numbered by their place in the cache, and those that end before ``begin``, the
    first row that some query token's window reaches, are left out.
    """
    first = 0
    if work is None:
        blocks = (length + BN - 1) // BN
        if begin is not None:
            first = begin // BN
            blocks -= first
    else:
        blocks = gl.load(work + 2 * LIST_COUNT * plane.to(gl.int64))
    if items is None:
        per = gl.maximum((blocks + gl.num_programs(1) - 1) // gl.num_programs(1), least)
        lo = gl.minimum(gl.program_id(1) * per, blocks)
        hi = gl.minimum(lo + per, blocks)
    else:
        lo = gl.where(b == b0, gl.minimum(t0, blocks), 0)
        hi = gl.where((b == b1 - 1) & (t1 > 0), gl.minimum(t1, blocks), blocks)
    return first + lo, first + hi, blocks


@gluon.jit
def _place(table_row, b, token, length, PAGE: gl.constexpr):
    """Coordinates along the cache's first two axes of the box that starts at this token of request b."""
    if PAGE == 0:
        return b, token
    else:
        inside = token < length
        page = gl.load(table_row + token // PAGE, mask=inside, other=0)  # slots past the length are not read
        # row PAGE lies outside the tensor: zeros, and nothing is fetched
        return page, gl.where(inside, token % PAGE, PAGE)


@gluon.jit
def _copy(desc, tile, bar, table_row, b, page, row, i, length, COL: gl.constexpr, WIDTH: gl.constexpr,
          FIRST: gl.constexpr, CHUNKS: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr):  # fmt: skip
    """Issue the copies of some chunks of 64 columns of block i into tile [64,WIDTH], counted on bar.

    The first column of the tile is COL. ``page, row`` is the place of a block that is one box. The places of smaller
    boxes are looked up one by one: the 40 registers that the consumers leave the producer have no room for all of them,
    and a cache line of the table lasts several blocks.
    """
    CUBE: gl.constexpr = rows_alike(3, gl.num_ctas())
    expect(bar, BN * CHUNKS * 64 * 2)
    if BOX == BN and CHUNKS * 64 == WIDTH:
        cube = reshaped(tile, desc.dtype, [1, BN, WIDTH], CUBE)
        load_box(desc, [page, row, COL], bar, cube)
    else:
        # A 128-byte-swizzled tile [64,WIDTH] is WIDTH / 64 chunks [64,64] one after the other, and BOX (a multiple of
        # the swizzle's 8) rows of a chunk are contiguous.
        boxes = reshaped(tile, desc.dtype, [WIDTH // 64 * (BN // BOX), 1, BOX, 64], CUBE)
        for r in range(BN // BOX):
            if BOX != BN:
                page, row = _place(table_row, b, i * BN + r * BOX, length, PAGE)
            for c in gl.static_range(FIRST, FIRST + CHUNKS):
                load_box(desc, [page, row, COL + c * 64], bar, boxes.index(c * (BN // BOX) + r))


@gluon.jit
def _copy_half(latent, tiles, bars, table_row, b, page, row, i, length, stage, half: gl.constexpr, PAGE: gl.constexpr,
               BOX: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Issue the copies of half the latent columns of block i, counted on PARTS barriers."""
    CHUNKS: gl.constexpr = HALF // 64 // PARTS
    for part in gl.static_range(PARTS):
        bar = loaded(stage, half, part)
        _copy(latent, tiles.index(TILE + 2 * stage + half), bars.index(bar), table_row, b, page, row, i, length,
              half * HALF, HALF, part * CHUNKS, CHUNKS, PAGE, BOX)  # fmt: skip


@gluon.jit
def producer(latent, rope, table, seq_lens, items, work, reach, table_stride, work_b, plane, T, B, least, tiles, narrow,
             bars, PAGE: gl.constexpr, BOX: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """Fill the stages with the blocks of this CTA's items, in order."""
    used0 = 0
    used1 = 0
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
        if PAGE > 0:
            table_row = table + b.to(gl.int64) * table_stride
        for block in range(lo, hi):
            i = place_of(listed, plane, block)
            stage = (block - lo) % 2
            # On a fresh barrier, a wait for the phase before the first one returns at once: the first loads find the
            # stage free.
            phase = (gl.where(stage == 0, used0, used1) & 1) ^ 1
            page = b
            row = i * BN
            if BOX == BN:  # look up before the wait for a free stage, where the producer spends its time
                page, row = _place(table_row, b, i * BN, length, PAGE)
            mbarrier.wait(joint(bars.index(FREE + 2 * stage)), phase)
            _copy_half(latent, tiles, bars, table_row, b, page, row, i, length, stage, 0, PAGE, BOX, PARTS)
            mbarrier.wait(joint(bars.index(FREE + 2 * stage + 1)), phase)
            _copy_half(latent, tiles, bars, table_row, b, page, row, i, length, stage, 1, PAGE, BOX, PARTS)
            if rope is not None:
                _copy(rope, narrow.index(NARROW + stage), bars.index(3 * stage + 2), table_row, b, page, row, i, length,
                      0, ROPE, 0, 1, PAGE, BOX)  # fmt: skip
            used0 += 1 - stage
            used1 += stage
