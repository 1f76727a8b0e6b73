"""The Hopper kernel for float8 rows: the consumers of decode_gluon.py behind the producer of fp8_producer_gluon.py.

To the consumers the rows are in half precision, and those that nobody sees are zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_compile.kernels.hopper.decode_gluon import BARRIERS, Q_READY, consumer
from mla_compile.kernels.hopper.fp8_producer_gluon import fp8_producer
from mla_compile.kernels.hopper.producer_gluon import FACTOR


@gluon.jit(do_not_specialize=["T", "B", "S", "H", "least"])
def mla_seesaw_fp8(query, latent, rope, table, lengths, sinks, kv_scale, token_scale, items, slots, work, o_part,
                   lse_part, out, lse, scale, softcap, reach, query_b, query_s, query_h, latent_b, latent_t, rope_b,
                   rope_t, scale_b, scale_t, table_b, work_b, plane, T, B, S, H, least, DTYPE: gl.constexpr,
                   PAGE: gl.constexpr, TABLE_PAGE: gl.constexpr, CAUSAL: gl.constexpr, PARTIAL: gl.constexpr,
                   REGS: gl.constexpr):  # fmt: skip
    """Absorbed decode attention of one layer over float8 rows; grid (blocks of 64 rows, splits or partitions, B or 1).

    As ``mla_seesaw``, but for: latent float8_e4m3fn [B,T,512] or [P,TABLE_PAGE,512] and rope alike, both passed as
    int32, by strides in bytes that are multiples of 16; pages of any size. PAGE: TABLE_PAGE, or 0 where the pages lie
    behind each other. DTYPE is that of the products. Rows are multiplied by ``kv_scale`` float32 [], or by
    ``token_scale`` float32 [B,T] or [P,TABLE_PAGE] by strides; the other is None.
    """
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(DTYPE, [6, 64, 256], SWIZZLED)
    narrow = gl.allocate_shared_memory(DTYPE, [3, 64, 64], SWIZZLED)
    stats = gl.allocate_shared_memory(gl.float32, [FACTOR + 2, 64], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER)
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=2 if i == Q_READY else 1)
    fence_async_shared()
    SCALED: gl.constexpr = token_scale is not None
    gl.warp_specialize(
        [
            (fp8_producer, (latent, rope, token_scale, table, lengths, items, work, reach, latent_b, latent_t, rope_b,
                            rope_t, scale_b, scale_t, table_b, work_b, plane, T, B, least, tiles, narrow, stats, bars,
                            PAGE, TABLE_PAGE)),
            (consumer, (0, query, lengths, sinks, kv_scale, items, slots, work, o_part, lse_part, out, lse, scale,
                        softcap, reach, query_b, query_s, query_h, work_b, plane, T, B, S, H, least, tiles, narrow,
                        stats, bars, CAUSAL, PARTIAL, False, True, SCALED)),
            (consumer, (1, query, lengths, sinks, kv_scale, items, slots, work, o_part, lse_part, out, lse, scale,
                        softcap, reach, query_b, query_s, query_h, work_b, plane, T, B, S, H, least, tiles, narrow,
                        stats, bars, CAUSAL, PARTIAL, False, True, SCALED)),
        ],
        [4, 4],
        [REGS, REGS],
    )  # fmt: skip
