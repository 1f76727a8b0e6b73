"""The Hopper kernel for index lists: the consumers of decode_gluon.py with the producer of list_producer_gluon.py.

An index list belongs to one query token, so a CTA's 64 query rows are heads of one token, and splits divide the list.
The producer writes bits that tell which entries are hidden (by length, causality, a window or a boolean mask), so the
consumers read neither lengths nor mask. For the consumers, a block is 64 rows, and the hidden rows are zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_compile.kernels.hopper.decode_gluon import BARRIERS, Q_READY, consumer
from mla_compile.kernels.hopper.list_producer_gluon import THREADS, list_producer
from mla_compile.kernels.hopper.producer_gluon import BN, FREE


@gluon.jit(do_not_specialize=["T", "tokens", "S", "H", "entries", "least"])
def mla_seesaw_lists(query, latent, rope, indices, table, lengths, mask, places, words, sinks, o_part, lse_part, out,
                     lse, scale, softcap, reach, query_b, query_s, query_h, latent_b, latent_t, rope_b, rope_t, table_b,
                     mask_b, mask_s, mask_t, indices_b, indices_s, entries, T, tokens, S, H, least, PAGE: gl.constexpr,
                     LIST_PAGE: gl.constexpr, CAUSAL: gl.constexpr, PARTIAL: gl.constexpr,
                     REGS: gl.constexpr, HELD: gl.constexpr):  # fmt: skip
    """Compute absorbed decode attention over listed keys; grid (blocks of 64 heads x query tokens, splits, 1).

    The kernel differs from ``mla_seesaw`` as follows. latent [B,T,512] or [P,LIST_PAGE,512] and rope (or None) are
    pointers, with strides that are multiples of 8. indices int32 [B,S,entries] and mask uint8 [B,1,S,T] (or None) have
    any strides. ``tokens`` is B * S. PAGE is LIST_PAGE, or 0 if the pages are consecutive in memory. Scratch buffers
    are places int32 [tokens,blocks,64] and words int32 [tokens,blocks,2], with blocks = cdiv(entries, 64).
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(latent.dtype.element_ty, [6, 64, 256], SWIZZLED)
    narrow = gl.allocate_shared_memory(latent.dtype.element_ty, [3, 64, 64], SWIZZLED)
    stats = gl.allocate_shared_memory(gl.float32, [6, 64], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS + 1, 1], BARRIER)
    for i in gl.static_range(BARRIERS + 1):
        mbarrier.init(bars.index(i), count=THREADS if i < FREE else 2 if i == Q_READY else 1)
    fence_async_shared()
    ROTARY: gl.constexpr = rope is not None
    blocks = (entries + BN - 1) // BN
    gl.warp_specialize(
        [
            (list_producer, (latent, rope, indices, table, lengths, mask, places, words, latent_b, latent_t, rope_b,
                             rope_t, table_b, mask_b, mask_s, mask_t, indices_b, indices_s, entries, reach, T, S, H,
                             least, tiles, narrow, bars, PAGE, LIST_PAGE, CAUSAL)),
            (consumer, (0, query, None, sinks, None, None, None, words, o_part, lse_part, out, lse, scale, softcap,
                        None, query_b, query_s, query_h, blocks, 0, entries, tokens, S, H, least, tiles, narrow, stats,
                        bars, False, PARTIAL, True, True, True, False, 1, HELD, ROTARY)),
            (consumer, (1, query, None, sinks, None, None, None, words, o_part, lse_part, out, lse, scale, softcap,
                        None, query_b, query_s, query_h, blocks, 0, entries, tokens, S, H, least, tiles, narrow, stats,
                        bars, False, PARTIAL, True, True, True, False, 1, HELD, ROTARY)),
        ],
        [4, 4],
        [REGS, REGS],
    )  # fmt: skip
