"""Index lists: how the attention kernel reads ``indices``, an int32 list of keys for each query token (Triton).

The entries of a tile are loaded one iteration before the rows, so that no iteration waits for its own addresses. If a
row needs a second look-up (its page, or the mask at its key), a block first writes the places of its split to scratch,
and then walks these places. Several blocks may write the same entry, but they write equal values. Each block reads only
what it wrote itself.

A *place* is the number of a row in the cache: the token, or ``page * PAGE + slot``. The place is -1 if an entry names
no key, or a key that is hidden by lengths, causality, the window or a boolean mask. An additive mask becomes one
float32 per place, for scores in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.tiles_triton import LOG2E


@triton.jit
def entries_of(x, tile, entries, BLOCK_N: tl.constexpr, NONE: tl.constexpr):
    """Return a tile's entries [BLOCK_N] of the list ``x`` [entries]; NONE past the end of the list."""
    i = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(x + i, mask=i < entries, other=NONE)


@triton.jit
def names(n, length, own, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether the query token sees the key of each entry in ``n``. ``own``: the query token's position."""
    seen = (n >= 0) & (n < length)
    if CAUSAL:
        seen = seen & (n <= own)
    if WINDOW:
        seen = seen & (n > own - window)
    return seen


@triton.jit
def base_2(value):
    """Convert a value of an additive mask for scores in base 2; the lowest finite values stay finite."""
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
    """Write the places (and biases) of entries [first, last) of a query token's list, COUNT at a time."""
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
