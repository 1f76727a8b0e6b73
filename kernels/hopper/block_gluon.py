"""What the consumers of the Hopper kernel (decode_gluon.py) know of a block of 64 keys: which of them are visible.

Without a mask or lists those before the query's limit are. A mask's list of tiles, or a list of keys, has 64 bits for
each block (MASKED, LISTED); beside a mask the limit counts too, and a list's bits say all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_compile.kernels.hopper.producer_gluon import BN, HALF, LIST_WORD, place_of


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
def _bits(low, high, n):
    """Which of the keys n of a block are visible."""
    return (gl.where(n < 32, low, high) >> (n & 31)) & 1 != 0


@gluon.jit
def softmax(s, m_before, limit, n0, low, high, scale_log2, MASKED: gl.constexpr, LISTED: gl.constexpr,
            S_L: gl.constexpr):  # fmt: skip
    """P (unnormalised, base 2) of a block from row n0 on, the rescaling of what was summed before, the maximum."""
    column = gl.arange(0, BN, gl.SliceLayout(0, S_L))
    if LISTED:
        visible = gl.expand_dims(_bits(low, high, column), 0)
    else:
        visible = gl.expand_dims(n0 + column, 0) < gl.expand_dims(limit, 1)
        if MASKED:
            visible = visible & gl.expand_dims(_bits(low, high, column), 0)
    s = gl.where(visible, s * scale_log2, float("-inf"))
    m = gl.maximum(m_before, gl.max(s, 1))
    return gl.exp2(s - gl.expand_dims(m, 1)), gl.exp2(m_before - m), m


@gluon.jit
def zero_rows(tile, first, low, high, MASKED: gl.constexpr):
    """Zeroes the rows of a [64,256] half that are not to be read: from first on, or those that the bits leave out."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, BN, gl.SliceLayout(1, L))
    keep = r < first
    if MASKED:
        keep = _bits(low, high, r)
    for c in gl.static_range(HALF // 64):
        part = tile.slice(c * 64, 64, 1)
        v = part.load(L)
        part.store(gl.where(gl.expand_dims(keep, 1), v, 0.0).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def ragged(is_last, low, high, MASKED: gl.constexpr, LISTED: gl.constexpr):
    """Whether a block has rows that are not to be read as values. Those of a list that nobody sees are zeros."""
    if LISTED:
        return False
    elif MASKED:
        return (low & high) != -1
    else:
        return is_last
