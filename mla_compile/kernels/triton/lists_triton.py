"""Keys by a list: how the attention kernel uses ``indices``, an int32 list of keys for each query token (Triton).

The entries of a tile are loaded one iteration before its rows, so that no iteration waits for its own addresses. If the
place of a row needs a second look-up (its page, or the mask at that key), a block first writes the places of its split
to scratch, and then walks those. All blocks that write an entry write the same bits, and each reads only what it wrote
itself.

A place is the number of a row in the cache: the token, or ``page * PAGE + slot``. It is -1 if an entry names no key, or
one that lengths, causality, the window or a boolean mask hide. An additive mask becomes one float32 for each place, in
base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.tiles_triton import LOG2E


@triton.jit
def entries_of(x, tile, entries, BLOCK_N: tl.constexpr, NONE: tl.constexpr):
    """The entries of ``x`` [entries] for a tile, [BLOCK_N]; NONE past the end."""
    i = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(x + i, mask=i < entries, other=NONE)


@triton.jit
def names(n, length, own, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which entries n name a key that the query token sees; ``own``: the position of the token itself."""
    seen = (n >= 0) & (n < length)
    if CAUSAL:
        seen = seen & (n <= own)
    if WINDOW:
        seen = seen & (n > own - window)
    return seen


@triton.jit
def base_2(value):
    """The value of an additive mask for scores in base 2; the lowest finite values stay finite."""
    value = value.to(tl.float32)
    return tl.where((value < -2.3e38) & (value != float("-inf")), -2.3e38, value) * LOG2E


@triton.jit
def write_places(
    indices,
    table,
    mask,
    places,
    bias,
    first,
    last,
    length,
    own,
    window,
    mask_t,
    PAGE: tl.constexpr,
    COUNT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write places (and biases) of the entries [first, last) of a query token's list, COUNT at a time."""
    for start in range(first, last, COUNT):
        i = start + tl.arange(0, COUNT)
        n = tl.load(indices + i, mask=i < last, other=-1)
        seen = names(n, length, own, window, CAUSAL, WINDOW)
        if mask is not None:
            value = tl.load(mask + n.to(tl.int64) * mask_t, mask=seen, other=0)
            if bias is None:
                seen = seen & (value != 0)
            else:
                tl.store(bias + i, base_2(value), mask=i < last)
                seen = seen & (value != float("-inf"))
        if PAGE > 0:
            n = tl.load(table + n // PAGE, mask=seen, other=0) * PAGE + n % PAGE
        tl.store(places + i, tl.where(seen, n, -1), mask=i < last)
    tl.debug_barrier()
