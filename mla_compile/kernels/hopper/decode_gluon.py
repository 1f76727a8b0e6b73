"""Absorbed decode attention on Hopper (sm_90): one TMA producer and two consumer warpgroups, written in Gluon.

One CTA owns 64 packed query rows (row ``m`` is token ``m // H``, head ``m % H`` of one request) and walks blocks of 64
cache rows. The float32 output, 64 x 512, takes half of an SM's registers, so it is cut in two: consumer ``w`` holds
columns ``256 w .. 256 w + 255``. The schedule is the seesaw of FlashMLA's 2025-04-22 write-up, built from scratch:

* The producer copies each block once, by TMA, into a *stage*: two halves of the latent, and the rope part. There are
  two stages, and each half of a stage is released separately.
* Consumer ``j % 2`` computes the scores of block ``j`` (``S = Q K_j^T``, all columns), and then the softmax weights
  ``P_j``. The consumers pass a running maximum from block to block. ``P_j`` overwrites the rope part of block ``j``,
  which is no longer needed. If rows have no rotary part, as in DeepSeek-V4 (ROTARY is not set), that memory holds only
  P. A new P is written only after both halves of its block have arrived. By then, both consumers have applied the
  stage's previous P.
* Each consumer applies every block, in order, to its half of the output: ``O = O * alpha_j + P_j V_j``, where ``V_j``
  is the latent block that is already in shared memory. A consumer reads its own ``P_j`` from registers, and the other
  consumer's ``P_j`` from shared memory. Consumer 0 issues the scores of its next block before it waits for the product
  with the previous block.
* Each consumer waits for the barriers of all TMA data that it reads, even if the other consumer's ``P_j`` implies that
  block ``j`` has arrived. Such a wait returns at once. Without it, the kernel would rely on transitive visibility of
  writes.

An *item* is a run of blocks of one request. A CTA has one item on the split grid, and several if there is a schedule
(kernels/triton/schedule.py). Blocks 0, 2, 4... of every item use stage 0, the others stage 1. The stages may thus be
used unequally often, so barrier phases are counted per stage over the life of the CTA (``used0``, ``used1``).

The last block of a request may have rows past the request's length. Their scores are masked. As values, these rows must
be zero, because ``0 * NaN`` is NaN. TMA fills rows outside the tensor with zeros. Other rows are zeroed in shared
memory.

A boolean mask that is the same for all query rows is passed as a list of the tiles that have a visible key, with 64
bits for each tile (``work``, written by kernels/triton/tiles_triton.py). The blocks are then the tiles of the list.
Keys that no query sees are treated like keys past the length.

With a window, the first block of a request is the first one that some query token sees. The block's rows before the
window are masked and zeroed like rows past the length.

Index lists have their own kernel and producer (list_gluon.py), which use these consumers with LISTED set. Listed rows
arrive by cp.async (COPIED), and no row has to be zeroed (CLEAN). Float8 rows, with or without index lists, also have
their own kernel (fp8_gluon.py). Its producer converts and stores the rows, and no row has to be zeroed.

Measurements on a GPU will decide between these variants (benchmarks/gpu/tune.py):

* PARTS: each half of a stage is counted on one barrier or on four. With four, scores begin with the first 64 columns of
  a block, as with FlashMLA's nine barriers.
* HELD: the consumers keep the rotary columns of the query in registers, as FlashMLA does. The products with these
  columns then read half as much shared memory.
* Two CTAs: a cluster shares the copies of a block, and each CTA has its own 64 query rows (cluster_gluon.py).

The kernel compiles without spills with Triton 3.6 to 3.9 (benchmarks/gpu/offline.py asserts it). Comments mark the
lines that exist only for the compiler. tests/kernels/hopper/test_decode_gluon.py runs the barrier protocol of this
source on the CPU. The test does not model the fences and barriers inside a warpgroup. benchmarks/gpu/ptx.py checks
these in the compiled PTX. On a GPU, Triton's ConSan looks for races (``consan`` of kernels/hopper/runner.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_compile.kernels.hopper.block_gluon import first_key, keys, ragged, softmax, weights, zero_rows
from mla_compile.kernels.hopper.cluster_gluon import barrier, joint, own, product, rows_alike, threads, vector
from mla_compile.kernels.hopper.list_producer_gluon import LIST_READY, token_of
from mla_compile.kernels.hopper.producer_gluon import (
    BN,
    FACTOR,
    FREE,
    HALF,
    NARROW,
    ROPE,
    TILE,
    blocks_of,
    length_of,
    producer,
    requests_of,
)
from mla_compile.kernels.hopper.rows_gluon import ROWS, load_query, scaled, store_final, store_partial
from mla_compile.kernels.hopper.scores_gluon import half_arrived, scores

LOWEST = gl.constexpr(-3.4028234663852886e38)  # the initial maximum: finite, so that a row without keys makes no NaN
# Barriers after those of the producer.
P_READY = gl.constexpr(10)  # + number of the consumer: its P is stored
L_READY = gl.constexpr(12)  # + number of the consumer: its row sums are stored
Q_READY = gl.constexpr(14)
BARRIERS = gl.constexpr(15)
NINE_BARRIERS = gl.constexpr(27)  # including those of the later parts of each half, see ``loaded``
# Rows of the float32 exchange [6,64]: the running maximum, the rescaling and the row sums of each consumer.
ALPHA = gl.constexpr(2)
SUMS = gl.constexpr(4)


@gluon.jit
def _even_blocks(tiles, narrow, held, stats, bars, used0, used1, n, lo, work, plane, length, begin, limit, lower,
                 scale, softcap, LISTED: gl.constexpr, COPIED: gl.constexpr, CLEAN: gl.constexpr,
                 SCALED: gl.constexpr, PARTS: gl.constexpr, ROTARY: gl.constexpr):  # fmt: skip
    """Process blocks lo..lo+n as consumer 0: scores of the first, third, ... block, and output columns 0..255."""
    CTAS: gl.constexpr = gl.num_ctas()
    S_L: gl.constexpr = product(64, CTAS)
    O_L: gl.constexpr = product(256, CTAS)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    R_S: gl.constexpr = gl.SliceLayout(1, S_L)
    acc = gl.zeros([ROWS * CTAS, HALF], gl.float32, O_L)
    sums = gl.zeros([ROWS * CTAS], gl.float32, R_S)
    m = gl.full([ROWS * CTAS], LOWEST, gl.float32, R_S)
    MASKED: gl.constexpr = work is not None and not LISTED
    # Without a list: the index (from lo) of the block with rows past the length. No block has them if it is >= n.
    last = length // BN - lo
    factor = None
    if SCALED:
        factor = stats.index(FACTOR)
    for t in range((n + 1) // 2):
        # Always 0, but LLVM does not know that. Otherwise, LLVM would hoist 72 wgmma descriptors and spill them.
        zero = t >> 29
        older = t > 0
        # Issued before the waits, because these loads take as long as a wait.
        first = first_key(work, plane, lo + 2 * t, LISTED)
        low, high = keys(work, plane, lo + 2 * t, LISTED)
        low1, high1 = keys(work, plane, gl.maximum(lo + 2 * t - 1, 0), LISTED)
        # The product with block 2t-1, which the other consumer scored. The first iteration has no such block. It
        # multiplies the query by itself instead, and use_acc below drops the result. An `if` would duplicate the loop.
        mbarrier.wait(bars.index(P_READY + 1), ((used1 + t) & 1) ^ 1)
        # The first iteration does not wait. Block 1 may have arrived already, which looks like an unfinished phase.
        half_arrived(bars, 1, 0, ((used1 + t) & 1) ^ 1, older, COPIED, PARTS)
        a1 = gl.where(older, stats.index(ALPHA + 1).load(R_S), 1.0)
        m1 = gl.where(older, stats.index(1).load(R_S), LOWEST)
        sums = sums * a1
        if MASKED and not CLEAN:  # noqa: SIM102  decided by the compiler
            if older & ((low1 & high1) != -1):
                zero_rows(tiles.index(TILE + 2), 0, length, begin, low1, high1, MASKED)
        acc = scaled(acc, a1, O_L)
        other = gl.where(older, 1, 0)
        p_other, v = own(narrow.index((NARROW + 1) * other)), tiles.index((TILE + 2) * other)
        acc_t = warpgroup_mma(p_other, v, acc, is_async=True)
        s_t = scores(tiles, narrow, held, bars, zero, zero, (used0 + t) & 1, COPIED, PARTS, ROTARY, S_L)
        acc = warpgroup_mma_wait(2 * PARTS + ROTARY, deps=[acc_t])  # one group per product, so the scores stay pending
        mbarrier.arrive(joint(bars.index(FREE + 2)), pred=older)
        s = warpgroup_mma_wait(0, deps=[s_t])
        p, a, m = softmax(s, m1, limit, lower, first, low, high, scale, softcap, factor, MASKED, LISTED, S_L)
        stats.index(0).store(m)
        p16 = weights(p, factor, narrow.dtype, S_L)
        own(narrow.index(NARROW)).store(p16)
        stats.index(ALPHA).store(a)
        fence_async_shared()
        mbarrier.arrive(bars.index(P_READY))
        sums = sums * a + gl.sum(p, 1)
        p_own = gl.convert_layout(p16, P_L)
        if ragged(2 * t == last, first, begin, low, high, MASKED, CLEAN):
            zero_rows(tiles.index(TILE), first, length, begin, low, high, MASKED)
        acc = scaled(acc, a, O_L)
        acc_u = warpgroup_mma(p_own, tiles.index(TILE), acc, use_acc=older, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_u])
        mbarrier.arrive(joint(bars.index(FREE)))
    if (n > 0) & (n % 2 == 0):
        mbarrier.wait(bars.index(P_READY + 1), (used1 + n // 2 + 1) & 1)
        half_arrived(bars, 1, 0, (used1 + n // 2 + 1) & 1, True, COPIED, PARTS)
        a1 = stats.index(ALPHA + 1).load(R_S)
        m = stats.index(1).load(R_S)
        sums = sums * a1
        low, high = keys(work, plane, lo + n - 1, LISTED)
        first = first_key(work, plane, lo + n - 1, LISTED)
        if ragged(n - 1 == last, first, begin, low, high, MASKED, CLEAN):
            zero_rows(tiles.index(TILE + 2), first, length, begin, low, high, MASKED)
        acc = scaled(acc, a1, O_L)
        acc = warpgroup_mma(own(narrow.index(NARROW + 1)), tiles.index(TILE + 2), acc, is_async=False)
        mbarrier.arrive(joint(bars.index(FREE + 2)))
    return acc, sums, m


@gluon.jit
def _odd_blocks(tiles, narrow, held, stats, bars, used0, used1, n, lo, work, plane, length, begin, limit, lower,
                scale, softcap, LISTED: gl.constexpr, COPIED: gl.constexpr, CLEAN: gl.constexpr,
                SCALED: gl.constexpr, PARTS: gl.constexpr, ROTARY: gl.constexpr):  # fmt: skip
    """Process blocks lo..lo+n as consumer 1: scores of the second, fourth, ... block, and output columns 256..511."""
    CTAS: gl.constexpr = gl.num_ctas()
    S_L: gl.constexpr = product(64, CTAS)
    O_L: gl.constexpr = product(256, CTAS)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    R_S: gl.constexpr = gl.SliceLayout(1, S_L)
    acc = gl.zeros([ROWS * CTAS, HALF], gl.float32, O_L)
    sums = gl.zeros([ROWS * CTAS], gl.float32, R_S)
    m = gl.full([ROWS * CTAS], LOWEST, gl.float32, R_S)
    MASKED: gl.constexpr = work is not None and not LISTED
    last = length // BN - lo
    factor = None
    if SCALED:
        factor = stats.index(FACTOR + 1)
    for t in range(n // 2):
        zero = t >> 29  # see _even_blocks
        first = first_key(work, plane, lo + 2 * t + 1, LISTED)
        low, high = keys(work, plane, lo + 2 * t + 1, LISTED)
        low0, high0 = keys(work, plane, lo + 2 * t, LISTED)
        s_t = scores(tiles, narrow, held, bars, zero, 1 + zero, (used1 + t) & 1, COPIED, PARTS, ROTARY, S_L)
        mbarrier.wait(bars.index(P_READY), (used0 + t) & 1)
        half_arrived(bars, 0, 1, (used0 + t) & 1, True, COPIED, PARTS)
        a0 = stats.index(ALPHA).load(R_S)
        m0 = stats.index(0).load(R_S)
        sums = sums * a0
        if MASKED and not CLEAN:
            if (low0 & high0) != -1:
                zero_rows(tiles.index(TILE + 1), 0, length, begin, low0, high0, MASKED)
        elif begin is not None:  # noqa: SIM102
            if (lo + 2 * t) * BN < begin:  # the request's first visible block: t is 0
                zero_rows(tiles.index(TILE + 1), lo * BN, length, begin, low0, high0, MASKED)
        acc = scaled(acc, a0, O_L)
        acc_t = warpgroup_mma(own(narrow.index(NARROW)), tiles.index(TILE + 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_t])
        p, a, m = softmax(s, m0, limit, lower, first, low, high, scale, softcap, factor, MASKED, LISTED, S_L)
        stats.index(1).store(m)
        p16 = weights(p, factor, narrow.dtype, S_L)
        own(narrow.index(NARROW + 1)).store(p16)
        stats.index(ALPHA + 1).store(a)
        fence_async_shared()
        mbarrier.arrive(bars.index(P_READY + 1))
        sums = sums * a + gl.sum(p, 1)
        p_own = gl.convert_layout(p16, P_L)
        acc = warpgroup_mma_wait(0, deps=[acc_t])
        mbarrier.arrive(joint(bars.index(FREE + 1)))
        if ragged(2 * t + 1 == last, first, begin, low, high, MASKED, CLEAN):
            zero_rows(tiles.index(TILE + 3), first, length, begin, low, high, MASKED)
        acc = scaled(acc, a, O_L)
        acc_u = warpgroup_mma(p_own, tiles.index(TILE + 3), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_u])
        mbarrier.arrive(joint(bars.index(FREE + 3)))
    if n % 2 == 1:
        mbarrier.wait(bars.index(P_READY), (used0 + n // 2) & 1)
        half_arrived(bars, 0, 1, (used0 + n // 2) & 1, True, COPIED, PARTS)
        a0 = stats.index(ALPHA).load(R_S)
        m = stats.index(0).load(R_S)
        sums = sums * a0
        low, high = keys(work, plane, lo + n - 1, LISTED)
        first = first_key(work, plane, lo + n - 1, LISTED)
        if ragged(n - 1 == last, first, begin, low, high, MASKED, CLEAN):
            zero_rows(tiles.index(TILE + 1), first, length, begin, low, high, MASKED)
        acc = scaled(acc, a0, O_L)
        acc = warpgroup_mma(own(narrow.index(NARROW)), tiles.index(TILE + 1), acc, is_async=False)
        mbarrier.arrive(joint(bars.index(FREE + 1)))
    return acc, sums, m


@gluon.jit
def consumer(W: gl.constexpr, q, seq_lens, sinks, kv_scale, items, slots, work, o_part, lse_part, out, lse, scale,
             softcap, reach, stride_qb, stride_qs, stride_qh, work_b, plane, T, B, S, H, least, tiles, narrow, stats,
             bars, CAUSAL: gl.constexpr, PARTIAL: gl.constexpr, LISTED: gl.constexpr, COPIED: gl.constexpr,
             CLEAN: gl.constexpr, SCALED: gl.constexpr, PARTS: gl.constexpr, HELD: gl.constexpr,
             ROTARY: gl.constexpr):  # fmt: skip
    """Process this CTA's items as consumer W.

    PARTIAL: items are whole requests (0), parts of requests (1), or either (2).
    LISTED: a request is one query token, its keys are the T entries of an index list, and ``work`` holds only their
    bits. COPIED: rows arrive by cp.async. CLEAN: rows that no query sees are zero. ``kv_scale`` [] is the scale of all
    rows, or None. SCALED: each row has its own scale, which is stored beside the stage. PARTS: the number of barriers
    per half of a stage. ROTARY: rows have a rotary part. HELD: the query's rotary part stays in registers.
    """
    CTAS: gl.constexpr = gl.num_ctas()
    S_L: gl.constexpr = product(64, CTAS)
    O_L: gl.constexpr = product(256, CTAS)
    R_S: gl.constexpr = gl.SliceLayout(1, S_L)
    Q_L: gl.constexpr = threads(True, CTAS)
    first_row = gl.program_id(0) * (ROWS * CTAS)
    M = S * H
    used0 = 0
    used1 = 0
    done = 0
    b0, b1, t0, t1 = requests_of(items, B)
    if LISTED:
        b0, heads = token_of(H)
        b1 = b0 + 1
        first_row = heads * ROWS  # lists do not use clusters
        M = H
    live = M - first_row
    if kv_scale is not None:
        scale = scale * gl.load(kv_scale)
    for b in range(b0, b1):
        length = length_of(seq_lens, b, T)
        begin = reach
        if reach is not None:
            begin = gl.maximum(length - reach, 0)
        cleared = begin  # rows before ``cleared`` hold other data
        if CLEAN or work is not None:
            cleared = None  # bits tell which rows hold other data; with CLEAN, no row does
        listed = work
        if work is not None:
            listed = work + 2 * b.to(gl.int64) * work_b
        counted = None if LISTED else listed
        lo, hi, blocks = blocks_of(items, counted, plane, length, begin, b, b0, t0, b1, t1, least)
        n = hi - lo
        whole = n == blocks
        if (PARTIAL < 2) | (n > 0) | whole:
            m_q = first_row + gl.arange(0, ROWS * CTAS, gl.SliceLayout(1, Q_L))
            rows = (m_q % H).to(gl.int64) * stride_qh
            if LISTED:
                rows += (b // S).to(gl.int64) * stride_qb + (b % S).to(gl.int64) * stride_qs
            else:
                rows += b.to(gl.int64) * stride_qb + (m_q // H).to(gl.int64) * stride_qs
            rows = gl.expand_dims(rows, 1)
            exists = gl.expand_dims(m_q < M, 1)
            # The query may be replaced here, because both consumers finished their products with the old query before
            # they exchanged sums. After they meet below, both have read the old sums, so the sums may be replaced, too.
            load_query(q, own(tiles.index(W)), rows, exists, W * HALF, HALF, Q_L)
            if W == 1 and ROTARY:
                load_query(q, own(narrow.index(0)), rows, exists, 2 * HALF, ROPE, Q_L)
            fence_async_shared()
            mbarrier.arrive(bars.index(Q_READY))
            mbarrier.wait(bars.index(Q_READY), done & 1)
            if LISTED:
                mbarrier.wait(bars.index(LIST_READY), 0)

            held = None
            if HELD:
                held = own(narrow.index(0)).load(gl.DotOperandLayout(0, S_L, 2))

            limit = gl.full([ROWS * CTAS], 0, gl.int32, R_S) + length
            token = (first_row + gl.arange(0, ROWS * CTAS, R_S)) // H
            lower = None
            if reach is not None:
                lower = limit - reach + token
            if CAUSAL:
                limit = limit - S + 1 + token
            if W == 0:
                acc, sums, m = _even_blocks(tiles, narrow, held, stats, bars, used0, used1, n, lo, listed, plane,
                                            length, cleared, limit, lower, scale, softcap, LISTED, COPIED, CLEAN,
                                            SCALED, PARTS, ROTARY)  # fmt: skip
            else:
                acc, sums, m = _odd_blocks(tiles, narrow, held, stats, bars, used0, used1, n, lo, listed, plane,
                                           length, cleared, limit, lower, scale, softcap, LISTED, COPIED, CLEAN,
                                           SCALED, PARTS, ROTARY)  # fmt: skip

            stats.index(SUMS + W).store(sums)
            mbarrier.arrive(bars.index(L_READY + W))
            mbarrier.wait(bars.index(L_READY + 1 - W), done & 1)
            total = sums + stats.index(SUMS + 1 - W).load(R_S)
            some = total != 0.0  # NaN is a result, too
            lse2 = gl.where(some, m + gl.log2(total), float("-inf"))
            factor = gl.where(some, 1.0 / total, 0.0)
            if kv_scale is not None:
                factor = factor * gl.load(kv_scale)
            acc = scaled(acc, factor, O_L)
            if PARTIAL == 0:
                store_final(out, lse, sinks, acc, lse2, b * M + first_row, live, H, W, S_L, O_L)
            elif PARTIAL == 1:
                row0 = (gl.program_id(1) * B + b) * M + first_row
                store_partial(o_part, lse_part, acc, lse2, row0, live, n, W, S_L, O_L)
            elif whole:
                store_final(out, lse, sinks, acc, lse2, b * M + first_row, live, H, W, S_L, O_L)
            else:
                row0 = (gl.load(slots + b) + gl.program_id(1)) * M + first_row
                store_partial(o_part, lse_part, acc, lse2, row0, live, n, W, S_L, O_L)
            used0 += (n + 1) // 2
            used1 += n // 2
            done += 1


@gluon.jit(do_not_specialize=["T", "B", "S", "H", "least"])
def mla_seesaw(q, latent, rope, table, seq_lens, sinks, items, slots, work, o_part, lse_part, out, lse, scale,
               softcap, reach, stride_qb, stride_qs, stride_qh, table_stride, work_b, plane, T, B, S, H, least,
               PAGE: gl.constexpr, BOX: gl.constexpr, CAUSAL: gl.constexpr, PARTIAL: gl.constexpr,
               REGS: gl.constexpr, PARTS: gl.constexpr, HELD: gl.constexpr):  # fmt: skip
    """Compute absorbed decode attention of one layer; grid (blocks of 64 rows per CTA, splits or partitions, B or 1).

    * q is [B,S,H,576], or [B,S,H,512] if rope is None. The last stride is 1.
    * latent and rope are descriptors of [B,T,512] and [B,T,64], or of [P,PAGE,...] if PAGE > 0. Their boxes are
      [1,BOX,256 or 64] and [1,BOX,64].
    * table is int32 [B,*] or None, seq_lens int32 [B] or None (T), sinks float32 [H] or None.
    * With a schedule, ``items`` int32 [partitions+1,2] holds each partition's first (request, block). ``slots`` int32
      [B] is a request's first scratch slot minus its first partition.
    * With a mask, ``work`` int32 [6,lists,entries,2] holds the lists of visible tiles. ``plane`` is the size of each of
      the 6 planes in entries, ``work_b`` the stride from one request to the next (0: one list for all).
    * ``scale`` is the factor of the products. Without a softcap, ``scale`` includes log2 e, and ``softcap`` is None.
      With a softcap, ``scale`` includes 1 / softcap, and ``softcap`` includes log2 e.
    * ``reach`` is window + S - 1, the number of rows that the query tokens of a request see in total, or None.
    * On the split grid, a request's blocks are divided evenly, with at least ``least`` blocks per split (as in
      kernels/triton/block_triton.py).

    Whole requests are written to out [B,S,H,512] and lse float32 (natural). Parts of requests are written to o_part
    float32 [splits,B,S*H,512] or [slots,S*H,512] and to lse_part (base 2). For an empty item, only lse_part is written
    (minus infinity).
    """
    CTAS: gl.constexpr = gl.num_ctas()
    SWIZZLED: gl.constexpr = rows_alike(2, CTAS)
    PLAIN: gl.constexpr = vector(CTAS)
    BARRIER: gl.constexpr = barrier(True, CTAS)
    tiles = gl.allocate_shared_memory(latent.dtype, [6, 64, 256], SWIZZLED)
    narrow = gl.allocate_shared_memory(latent.dtype, [3, 64, 64], SWIZZLED)
    stats = gl.allocate_shared_memory(gl.float32, [6, 64 * CTAS], PLAIN)
    NUMBER: gl.constexpr = BARRIERS if PARTS == 1 else NINE_BARRIERS
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, CTAS], BARRIER)
    for i in gl.static_range(NUMBER):
        if i >= FREE and i < FREE + 4:
            mbarrier.init(joint(bars.index(i)), count=1)
        else:
            mbarrier.init(bars.index(i), count=2 if i == Q_READY else 1)
    fence_async_shared()
    ROTARY: gl.constexpr = rope is not None
    # Making a consumer the default partition costs 400 bytes of spills.
    gl.warp_specialize(
        [
            (producer, (latent, rope, table, seq_lens, items, work, reach, table_stride, work_b, plane, T, B, least,
                        tiles, narrow, bars, PAGE, BOX, PARTS)),
            (consumer, (0, q, seq_lens, sinks, None, items, slots, work, o_part, lse_part, out, lse, scale, softcap,
                        reach, stride_qb, stride_qs, stride_qh, work_b, plane, T, B, S, H, least, tiles, narrow, stats,
                        bars, CAUSAL, PARTIAL, False, False, False, False, PARTS, HELD, ROTARY)),
            (consumer, (1, q, seq_lens, sinks, None, items, slots, work, o_part, lse_part, out, lse, scale, softcap,
                        reach, stride_qb, stride_qs, stride_qh, work_b, plane, T, B, S, H, least, tiles, narrow, stats,
                        bars, CAUSAL, PARTIAL, False, False, False, False, PARTS, HELD, ROTARY)),
        ],
        [4, 4],
        [REGS, REGS],
    )  # fmt: skip
