"""Decides which calls with different numbers of tokens share a launch, so that a growing cache is one kind of call.

The attention kernels take the number of tokens T as a scalar argument. They also take the stride between two requests,
which grows with T if requests are stored one after the other. The plan decides everything else that depends on T, and a
plan for more tokens also serves fewer tokens: the splits past the last tile are empty, as for a request that is shorter
than the cache. Calls are therefore planned, compiled and bound for T rounded up, and each launch gets the actual T.

While a cache holds fewer tokens than a query may select, the index lists grow with the cache. Each launch then also
gets the length of the lists, and the plan is for longer lists.

Per-token scales are handled like rows. Masks are not: with a mask, every T is a separate kind of call, because the
mask's strides depend on T, and its offsets could need 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

from mla_compile.kernels.call import DecodeCall

# The scalars that are set at each launch.
SIZED = ("T", "latent_b", "rope_b", "values_b", "scale_b", "entries", "indices_b", "indices_s")
STEP = 64  # T is rounded up to a multiple of this; above 1024 tokens, the step is larger
LARGEST = 1 << 20  # larger T are not rounded
_I32 = 1 << 31


class Grown(NamedTuple):
    """The properties of a call's rows that fix a launch, and the numbers that are set at each launch.

    ``most`` is the number of keys that a query may see, rounded up: T, or the length of its index list. ``forms`` holds
    shapes and strides, without what depends on T. ``scalars`` holds the values of :data:`SIZED`.
    """

    most: int
    forms: tuple[object, ...]
    scalars: tuple[int, ...]


def rounded(T: int) -> int:
    """Return the number of tokens for which a call of T tokens is planned.

    Above 1024 tokens, T is rounded up in steps of an eighth of the power of two below T.
    """
    step = max(STEP, 1 << max(0, (T - 1).bit_length() - 4))
    return -(-T // step) * step


def grown(call: DecodeCall) -> Grown | None:
    """Return how a call's rows may grow; None if every T is a separate kind of call, or rows have a wrong shape."""
    if call.mask is not None or call.block_table is not None:
        return None
    latent = call.latent
    if latent.dim() != 3 or not 1 < (T := latent.shape[1]) <= LARGEST:
        return None
    most = rounded(T)
    forms: list[tuple[object, ...] | None] = []
    scalars = [T]
    for rows in (latent, call.rope, call.values, call.kv_scale):
        scales = rows is call.kv_scale
        if rows is None or rows.dim() == 0:
            forms.append(rows if rows is None else ())
            scalars.append(0)
            continue
        if scales and rows.dim() == 2:
            rows = rows.unsqueeze(2)
        if rows.dim() != 3:
            return None
        B, tokens, width = rows.shape
        outer, row, column = rows.stride()
        if most * row + width * column >= _I32:
            return None
        # The compiled code depends on which strides are multiples of 16, except for the strides of scales. Rows whose
        # number of tokens differs from the latent's form a separate kind, which the checks refuse.
        distance = -1 if outer == T * row else outer
        forms.append((B, tokens == T, width, distance, scales or outer % 16 == 0, row, column))
        scalars.append(outer)
    if call.indices is None:
        return Grown(most, tuple(forms), (*scalars, 0, 0, 0))
    if call.indices.dim() != 3 or call.indices.stride(0) >= _I32:
        return None
    B, S, entries = call.indices.shape
    return Grown(rounded(entries), (*forms, (B, S)), (*scalars, entries, *call.indices.stride()[:2]))
