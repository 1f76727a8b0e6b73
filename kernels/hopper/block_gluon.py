"""What the consumers of the Hopper kernel (decode_gluon.py) know of a block of 64 keys: which of them are visible.

Without a mask or lists those before the query's limit are, and from its ``lower`` one on where there is a window. A
mask's list of tiles, or a list of keys, has 64 bits for each block; beside a mask the limits count too, and a list's
bits say all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_compile.kernels.hopper.cluster_gluon import threads
from mla_compile.kernels.hopper.producer_gluon import BN, HALF, LIST_WORD, place_of
from mla_compile.kernels.hopper.rows_gluon import LOG2E


@gluon.jit
def keys(work, plane, i, LISTED: gl.constexpr):
    """The 64 keys of block i as bits: 0..31, 32..63; without a mask or lists all of them."""
    if work is None:
        return -1, -1
    else:
        entry = work + 2 * i
        if not LISTED:
            entry += 2 * LIST_WORD * plane.to(gl.int64)
        return gl.load(entry), gl.load(entry + 1)


@gluon.jit
def first_key(work, plane, i, LISTED: gl.constexpr):
    """The first key of block i; in a list none is before the others."""
    if LISTED:
        return 0
    else:
        return place_of(work, plane, i) * BN


@gluon.jit
def bits(low, high, n):
    """Which of the keys n of a block are visible."""
    return (gl.where(n < 32, low, high) >> (n & 31)) & 1 != 0


@gluon.jit
def softmax(s, m_before, limit, lower, n0, low, high, scale, softcap, factor, MASKED: gl.constexpr,
            LISTED: gl.constexpr, S_L: gl.constexpr):  # fmt: skip
    """P (unnormalised, base 2) of a block from row n0 on, the rescaling of what was summed before, the maximum.

    MASKED: a mask says what is visible beside the limits. ``factor``: where the keys' scales lie, or None.
    """
    column = gl.arange(0, BN, gl.SliceLayout(0, S_L))
    if LISTED:
        visible = gl.expand_dims(bits(low, high, column), 0)
    else:
        n = gl.expand_dims(n0 + column, 0)
        visible = n < gl.expand_dims(limit, 1)
        if lower is not None:
            visible = visible & (n >= gl.expand_dims(lower, 1))
        if MASKED:
            visible = visible & gl.expand_dims(bits(low, high, column), 0)
    s = s * scale
    if factor is not None:
        s = s * gl.expand_dims(factor.load(gl.SliceLayout(0, S_L)), 0)
    if softcap is not None:  # scale has 1 / softcap in it; tanh x = 2 / (1 + e^-2x) - 1
        s = (2.0 / (1.0 + gl.exp2(s * (-2.0 * LOG2E))) - 1.0) * softcap
    s = gl.where(visible, s, float("-inf"))
    m = gl.maximum(m_before, gl.max(s, 1))
    return gl.exp2(s - gl.expand_dims(m, 1)), gl.exp2(m_before - m), m


@gluon.jit
def weights(p, factor, DTYPE: gl.constexpr, S_L: gl.constexpr):
    """P as the values are multiplied by it."""
    if factor is not None:
        p = p * gl.expand_dims(factor.load(gl.SliceLayout(0, S_L)), 0)
    return p.to(DTYPE)


@gluon.jit
def zero_rows(tile, n, length, begin, low, high, MASKED: gl.constexpr):
    """Zeroes the rows of a [64,256] half that are not to be read: those that the bits leave out, or by their numbers.

    Those are from n on, and rows from ``length`` on and before ``begin`` hold other data.
    """
    L: gl.constexpr = threads(False, gl.num_ctas())
    r = gl.arange(0, BN, gl.SliceLayout(1, L))
    if MASKED:
        keep = bits(low, high, r)
    elif begin is None:
        keep = r < length % BN
    else:
        keep = (r < length - n) & (r >= begin - n)
    for c in gl.static_range(HALF // 64):
        part = tile.slice(c * 64, 64, 1)
        v = part.load(L)
        part.store(gl.where(gl.expand_dims(keep, 1), v, 0.0).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def ragged(is_last, n, begin, low, high, MASKED: gl.constexpr, CLEAN: gl.constexpr):
    """Whether the block from row n on has some that are not to be read as values, and that are not zeros already."""
    if CLEAN:
        return False
    elif MASKED:
        return (low & high) != -1
    elif begin is not None:
        return is_last | (n < begin)
    else:
        return is_last
