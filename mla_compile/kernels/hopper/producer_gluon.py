"""The producer of the Hopper kernel (decode_gluon.py): the blocks that a CTA walks, and the TMA copies that load them.

An *item* is a run of blocks of one request. A CTA has one item on the split grid, and several if there is a schedule
(kernels/triton/schedule.py). With a mask, the blocks of a request are the tiles in its list of visible tiles
(kernels/triton/tiles_triton.py), and other blocks are never fetched. With a window, the blocks of a request start with
the first block that some query token sees.

TMA fills rows outside the tensor with zeros. A page past a request's length is never looked up. Its box is placed
outside the tensor instead. Pages before the window are looked up if the first block contains them. Their entries in the
block table may hold any number, because a page outside the cache gives zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_compile.kernels.hopper.cluster_gluon import expect, joint, load_box, reshaped, rows_alike

BN = gl.constexpr(64)  # cache rows per block; P overlays the rope part, so both must be 64 x 64
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
# FACTOR + stage: the row of the float32 exchange for a stage's per-token scales. It follows the consumers' rows.
FACTOR = gl.constexpr(6)
# Barriers: ``3 * stage + part`` for "loaded" (parts 0 and 1 are halves, 2 is rope), ``FREE + 2 * stage + half`` for
# "free again".
FREE = gl.constexpr(6)
# If a half arrives in four parts, the second to fourth use the barriers from PARTS_READY + 3 * (2 * stage + half) on.
PARTS_READY = gl.constexpr(15)


@gluon.jit
def loaded(stage, half, part: gl.constexpr):
    """Return the barrier for one part of half a stage. The barriers of parts 1 to 3 follow all other barriers."""
    if part == 0:
        return 3 * stage + half
    else:
        return PARTS_READY - 1 + 3 * (2 * stage + half) + part


@gluon.jit
def length_of(seq_lens, b, T):
    """Return the number of cache rows of request b; a length beyond the capacity T is clamped."""
    length = T
    if seq_lens is not None:
        length = gl.minimum(gl.maximum(gl.load(seq_lens + b), 0), T)
    return length


@gluon.jit
def requests_of(items, B):
    """Return this CTA's (first request, end request, first block of the first request, end block of the last)."""
    if items is None:
        return gl.program_id(2), gl.program_id(2) + 1, 0, 0
    else:
        p = items + 2 * gl.program_id(1)
        end = gl.load(p + 2)
        t1 = gl.load(p + 3)
        return gl.load(p), gl.minimum(end + (t1 > 0).to(gl.int32), B), gl.load(p + 1), t1


@gluon.jit
def place_of(work, plane, i):
    """Return the tile that is block i of a request: tile i, or the i-th tile of the request's list.

    The entries of a list are int64, of which only the low half is read.
    """
    if work is None:
        return i
    else:
        return gl.load(work + 2 * (LIST_TILE * plane.to(gl.int64) + i))


@gluon.jit
def blocks_of(items, work, plane, length, begin, b, b0, t0, b1, t1, least):
    """Return this CTA's blocks lo..hi of request b, and the request's number of blocks.

    If there is no list of tiles, blocks are numbered by their place in the cache. ``begin`` is the first row in the
    window of any query token. Blocks that end before ``begin`` are left out.
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
    """Return the coordinates, on the cache's first two axes, of the box that starts at ``token`` of request b."""
    if PAGE == 0:
        return b, token
    else:
        inside = token < length
        page = gl.load(table_row + token // PAGE, mask=inside, other=0)  # entries past the length are not read
        # Row PAGE lies outside the tensor, so TMA fills in zeros and fetches nothing.
        return page, gl.where(inside, token % PAGE, PAGE)


@gluon.jit
def _copy(desc, tile, bar, table_row, b, page, row, i, length, COL: gl.constexpr, WIDTH: gl.constexpr,
          FIRST: gl.constexpr, CHUNKS: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr):  # fmt: skip
    """Issue the copies of CHUNKS chunks of 64 columns of block i into tile [64,WIDTH], counted on bar.

    COL is the cache column of the tile's first column, FIRST the first chunk. If the block is one box, its place is
    ``page, row``. The places of smaller boxes are looked up one by one, because the producer's 40 registers cannot hold
    them all.
    """
    CUBE: gl.constexpr = rows_alike(3, gl.num_ctas())
    expect(bar, BN * CHUNKS * 64 * 2)
    if BOX == BN and CHUNKS * 64 == WIDTH:
        cube = reshaped(tile, desc.dtype, [1, BN, WIDTH], CUBE)
        load_box(desc, [page, row, COL], bar, cube)
    else:
        # A 128-byte-swizzled tile [64,WIDTH] consists of WIDTH / 64 consecutive chunks [64,64]. BOX rows of a chunk are
        # contiguous, because BOX is a multiple of 8, the number of rows of the swizzle.
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
            # On a fresh barrier, a wait for the phase before the first one returns at once, so the first loads find the
            # stage free.
            phase = (gl.where(stage == 0, used0, used1) & 1) ^ 1
            page = b
            row = i * BN
            if BOX == BN:  # looked up now, so that this overlaps the wait for a free stage
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
