"""Layouts, tiles and barriers of the Hopper kernel, for one CTA or for two CTAs that share the rows of a block.

Each CTA owns 64 packed query rows. In a cluster of two CTAs, the tensors with query rows (queries, P, maxima, sums)
have 128 rows, half of them in each CTA. Both CTAs hold all cache rows of a block. One copy from memory delivers these
rows to both CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.8 renamed this function.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.constexpr_function
def product(columns, CTAS):
    """Return the layout of an accumulator with a row for each query row and ``columns`` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16], *_bases([1, 0], CTAS))


@gluon.constexpr_function
def threads(own, CTAS):
    """Return the layout in which threads hold rows of 64 half-precision values.

    With ``own``, each CTA holds its own rows. Otherwise all CTAs hold the same rows.
    """
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], *_bases([int(own), 0], CTAS))


@gluon.constexpr_function
def rows_alike(rank, CTAS):
    """Return the layout of a tile of half-precision cache rows in shared memory. All CTAs hold the same rows."""
    return gl.NVMMASharedLayout(128, 16, rank, False, False, *_bases([0] * rank, CTAS))


@gluon.constexpr_function
def rows_own(CTAS):
    """Return the layout of a tile of query rows in shared memory."""
    return gl.NVMMASharedLayout(128, 16, 2, False, False, *_bases([1, 0], CTAS))


@gluon.constexpr_function
def vector(CTAS):
    """Return the layout of one number per query row in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], *_bases([1], CTAS))


@gluon.constexpr_function
def barrier(own, CTAS):
    """Return the layout of an mbarrier: one per CTA if ``own``, otherwise all CTAs use the first CTA's barrier."""
    return mbarrier.MBarrierLayout(*_bases([int(own)], CTAS))


@gluon.constexpr_function
def _bases(second, CTAS):
    """Return the last argument of a layout: none for one CTA, else the second CTA's offset.

    The offset has a number for each axis, in units of one CTA's share.
    """
    return ([second],) if CTAS == 2 else ()


@gluon.jit
def reshaped(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """View the same shared memory in another shape. The method became public in Triton 3.9."""
    if hasattr(tile, "reinterpret"):
        return tile.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return tile._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def own(tile):
    """View this CTA's tile [64,columns] as the cluster's tensor [64 * CTAS,columns], which includes the tile."""
    CTAS: gl.constexpr = gl.num_ctas()
    if CTAS == 1:
        return tile
    else:
        SHAPE: gl.constexpr = [tile.shape[0] * CTAS, tile.shape[1]]
        return reshaped(tile, tile.dtype, SHAPE, rows_own(CTAS))


@gluon.jit
def joint(bar):
    """Return a barrier in its cluster form: all CTAs arrive at the first CTA's barrier, and only that CTA waits."""
    CTAS: gl.constexpr = gl.num_ctas()
    if CTAS == 1:
        return bar
    else:
        return reshaped(bar, gl.int64, [1], barrier(False, CTAS))


@gluon.jit
def expect(bar, size: gl.constexpr):
    """Announce copies of ``size`` bytes at each CTA's barrier. In a cluster, the first CTA announces them for all.

    The producers of the other CTAs do not wait for a free stage, so their announcements could be too early.
    """
    CTAS: gl.constexpr = gl.num_ctas()
    if CTAS == 1:
        mbarrier.expect(bar, size)
    else:
        mbarrier.expect(bar, size, from_cta=0)


@gluon.jit
def load_box(desc, at, bar, tile):
    """Copy a box to ``tile`` in every CTA, counted on each CTA's barrier. The first CTA issues the copy for all."""
    CTAS: gl.constexpr = gl.num_ctas()
    if CTAS == 1:
        _load(desc, at, bar, tile)
    else:
        _load(desc, at, bar, tile, multicast=True)
