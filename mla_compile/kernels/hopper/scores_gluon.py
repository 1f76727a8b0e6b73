"""Waits for data and issues scores as the data arrives, for the consumers of the Hopper kernel (decode_gluon.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from mla_compile.kernels.hopper.cluster_gluon import own
from mla_compile.kernels.hopper.producer_gluon import BN, HALF, NARROW, TILE, loaded
from mla_compile.kernels.hopper.rows_gluon import ROWS


@gluon.jit
def _arrived(bars, i, phase, pred, COPIED: gl.constexpr):
    """Wait for a part of a block, and make the part readable for the tensor cores.

    Only COPIED rows need a fence here, because cp.async writes through the generic proxy, but the tensor cores read
    through the async proxy. (TMA writes through the async proxy, and a producer that stores rows fences its stores.)
    The copies have landed when the barrier's phase completes, because each producer thread arrives after its own
    copies. Every consumer thread waits for that phase. Its fence then orders the copies before the reads of the
    products that it issues next.
    """
    mbarrier.wait(bars.index(i), phase, pred=pred)
    if COPIED:
        fence_async_shared()


@gluon.jit
def half_arrived(bars, stage, half, phase, pred, COPIED: gl.constexpr, PARTS: gl.constexpr):
    """Wait for half the latent columns of a block, which are the values of the next product."""
    for part in gl.static_range(PARTS):
        _arrived(bars, loaded(stage, half, part), phase, pred, COPIED)


@gluon.jit
def scores(tiles, narrow, held, bars, zero, stage, phase, COPIED: gl.constexpr, PARTS: gl.constexpr,
           ROTARY: gl.constexpr, S_L: gl.constexpr):  # fmt: skip
    """Issue S = Q K^T for the block in a stage, in the order in which the block's parts arrive.

    ``held``: the rotary columns of the query in registers, or None.
    """
    s = gl.zeros([ROWS * gl.num_ctas(), BN], gl.float32, S_L)
    for half in gl.static_range(2):
        for part in gl.static_range(PARTS):
            _arrived(bars, loaded(stage, half, part), phase, True, COPIED)
            query = own(tiles.index(zero + half))
            rows = tiles.index(TILE + half + 2 * stage)
            if PARTS > 1:
                query = query.slice(part * HALF // PARTS, HALF // PARTS, 1)
                rows = rows.slice(part * HALF // PARTS, HALF // PARTS, 1)
            s = warpgroup_mma(query, rows.permute((1, 0)), s, use_acc=half + part > 0, is_async=True)
    if ROTARY:
        _arrived(bars, 3 * stage + 2, phase, True, COPIED)
        if held is None:
            s = warpgroup_mma(own(narrow.index(zero)), narrow.index(NARROW + stage).permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(held, narrow.index(NARROW + stage).permute((1, 0)), s, is_async=True)
    return s
