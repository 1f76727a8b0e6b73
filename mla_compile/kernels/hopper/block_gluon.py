"""Decides which keys of a block of 64 are visible to the consumers of the Hopper kernel (decode_gluon.py).

Without a mask or index lists, a query sees the keys below its ``limit``. With a window, it sees only keys from its
``lower`` on. A mask's list of tiles, or an index list, has 64 bits for each block. With a mask, the bits and the limits
apply. With an index list, only the bits apply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_compile.kernels.hopper.cluster_gluon import threads
from mla_compile.kernels.hopper.producer_gluon import BN, HALF, LIST_WORD, place_of
from mla_compile.kernels.hopper.rows_gluon import LOG2E


@gluon.jit
def keys(work, plane, i, LISTED: gl.constexpr):
    """Return the visibility bits of keys 0..31 and 32..63 of block i. All bits are set if ``work`` is None."""
    if work is None:
        return -1, -1
    else:
        entry = work + 2 * i
        if not LISTED:
            entry += 2 * LIST_WORD * plane.to(gl.int64)
        return gl.load(entry), gl.load(entry + 1)


@gluon.jit
def first_key(work, plane, i, LISTED: gl.constexpr):
    """Return the first key of block i; 0 with an index list, whose entries have no order."""
    if LISTED:
        return 0
    else:
        return place_of(work, plane, i) * BN


@gluon.jit
def bits(low, high, n):
    """Return whether each key in ``n`` is visible."""
    return (gl.where(n < 32, low, high) >> (n & 31)) & 1 != 0


@gluon.jit
def softmax(s, m_before, limit, lower, n0, low, high, scale, softcap, factor, MASKED: gl.constexpr,
            LISTED: gl.constexpr, S_L: gl.constexpr):  # fmt: skip
    """Return P (unnormalised, base 2) of the block from row n0 on, the factor for previous sums, and the new maximum.

    MASKED: a mask hides keys in addition to the limits. ``factor``: the keys' scales in shared memory, or None.
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
    if softcap is not None:  # scale includes 1 / softcap; tanh x = 2 / (1 + e^-2x) - 1
        s = (2.0 / (1.0 + gl.exp2(s * (-2.0 * LOG2E))) - 1.0) * softcap
    s = gl.where(visible, s, float("-inf"))
    m = gl.maximum(m_before, gl.max(s, 1))
    return gl.exp2(s - gl.expand_dims(m, 1)), gl.exp2(m_before - m), m


@gluon.jit
def weights(p, factor, DTYPE: gl.constexpr, S_L: gl.constexpr):
    """Multiply P by the keys' scales, if there are any, and convert it to DTYPE."""
    if factor is not None:
        p = p * gl.expand_dims(factor.load(gl.SliceLayout(0, S_L)), 0)
    return p.to(DTYPE)


@gluon.jit
def zero_rows(tile, n, length, begin, low, high, MASKED: gl.constexpr):
    """Zero the rows of a [64,256] half that must not be read as values. Its first row has number n.

    With MASKED, bits select these rows. Otherwise, they are the rows from ``length`` on and before ``begin``.
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
    """Whether rows of the block that starts at row n must be zeroed before they are read as values."""
    if CLEAN:
        return False
    elif MASKED:
        return (low & high) != -1
    elif begin is not None:
        return is_last | (n < begin)
    else:
        return is_last
