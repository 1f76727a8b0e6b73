"""The Hopper kernel for float8 rows: the consumers of decode_gluon.py with the producer of fp8_producer_gluon.py.

The consumers get rows in half precision, with zeros for rows that no query sees. Index lists work as in list_gluon.py:
the query rows of a CTA are heads of one query token, splits divide the token's list, and bits mark the hidden entries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_compile.kernels.hopper.decode_gluon import BARRIERS, Q_READY, consumer
from mla_compile.kernels.hopper.fp8_producer_gluon import fp8_producer
from mla_compile.kernels.hopper.producer_gluon import BN, FACTOR


@gluon.jit(do_not_specialize=["T", "B", "S", "H", "entries", "least"])
def mla_seesaw_fp8(query, latent, rope, indices, table, lengths, mask, places, sinks, kv_scale, token_scale, items,
                   slots, work, o_part, lse_part, out, lse, scale, softcap, reach, query_b, query_s, query_h, latent_b,
                   latent_t, rope_b, rope_t, scale_b, scale_t, scale_g, table_b, mask_b, mask_s, mask_t, indices_b,
                   indices_s, entries, work_b, plane, T, B, S, H, least, DTYPE: gl.constexpr, GROUPS: gl.constexpr,
                   PAGE: gl.constexpr, TABLE_PAGE: gl.constexpr, CAUSAL: gl.constexpr, PARTIAL: gl.constexpr,
                   REGS: gl.constexpr, HELD: gl.constexpr):  # fmt: skip
    """Compute absorbed decode attention over float8 rows; grid (blocks of 64 rows, splits or partitions, B or 1).

    The kernel differs from ``mla_seesaw`` as follows. latent is float8_e4m3fn [B,T,512] or [P,TABLE_PAGE,512]; rope has
    64 columns. Both are passed as int32. Their strides are in elements, and multiples of 16 bytes. Pages may have any
    size. PAGE is TABLE_PAGE, or 0 if the pages are consecutive in memory. DTYPE is the dtype of the products.

    If GROUPS is 0, rope is float8, too. Rows are multiplied by ``kv_scale`` float32 [], or by ``token_scale`` float32
    [B,T] or [P,TABLE_PAGE] of any strides; the unused pointer is None. If GROUPS > 0, rope is of DTYPE, and
    ``token_scale`` float32 [B,T,GROUPS] or [P,TABLE_PAGE,GROUPS], of any strides, has one scale for each 512 / GROUPS
    columns of the latent (a multiple of 64).

    With ``indices`` int32 [B,S,entries] of any strides, the grid and the mask are as in ``mla_seesaw_lists``. ``work``
    is then the scratch buffer that is called ``words`` there.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LISTED: gl.constexpr = indices is not None
    COUNT: gl.constexpr = BARRIERS + 1 if LISTED else BARRIERS
    tiles = gl.allocate_shared_memory(DTYPE, [6, 64, 256], SWIZZLED)
    narrow = gl.allocate_shared_memory(DTYPE, [3, 64, 64], SWIZZLED)
    stats = gl.allocate_shared_memory(gl.float32, [FACTOR + 2, 64], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], BARRIER)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=2 if i == Q_READY else 1)
    fence_async_shared()
    SCALED: gl.constexpr = token_scale is not None and GROUPS == 0
    # With index lists, the consumers treat each query token as a request whose keys are the entries of its list.
    gl.warp_specialize(
        [
            (fp8_producer, (latent, rope, token_scale, indices, table, lengths, mask, places, items, work, reach,
                            latent_b, latent_t, rope_b, rope_t, scale_b, scale_t, scale_g, table_b, mask_b, mask_s,
                            mask_t, indices_b, indices_s, entries, work_b, plane, T, B, S, H, least, tiles, narrow,
                            stats, bars, GROUPS, PAGE, TABLE_PAGE, CAUSAL)),
            (consumer, (0, query, None if LISTED else lengths, sinks, kv_scale, items, slots, work, o_part, lse_part,
                        out, lse, scale, softcap, None if LISTED else reach, query_b, query_s, query_h,
                        (entries + BN - 1) // BN if LISTED else work_b, plane, entries if LISTED else T,
                        B * S if LISTED else B, S, H, least, tiles, narrow, stats, bars, CAUSAL and not LISTED, PARTIAL,
                        LISTED, False, True, SCALED, 1, HELD, True)),
            (consumer, (1, query, None if LISTED else lengths, sinks, kv_scale, items, slots, work, o_part, lse_part,
                        out, lse, scale, softcap, None if LISTED else reach, query_b, query_s, query_h,
                        (entries + BN - 1) // BN if LISTED else work_b, plane, entries if LISTED else T,
                        B * S if LISTED else B, S, H, least, tiles, narrow, stats, bars, CAUSAL and not LISTED, PARTIAL,
                        LISTED, False, True, SCALED, 1, HELD, True)),
        ],
        [4, 4],
        [REGS, REGS],
    )  # fmt: skip
