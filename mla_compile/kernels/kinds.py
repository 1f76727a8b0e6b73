"""Decides which calls with different numbers of tokens share a launch, so that a growing cache is one kind of call.

The number of tokens T is a scalar of the attention kernels. So is the stride between the rows of two requests, which
grows with T if requests are stored one after the other. Everything else that follows from T is decided by the plan, and
a plan for more tokens also serves fewer: splits past the last tile are empty, as they are for a request that is shorter
than the cache. Calls are therefore planned, compiled and bound for T rounded up, and each launch gets T itself.

While a cache holds fewer tokens than a query may choose, the lists of chosen keys grow with it. Each launch then gets
their length, too, and the plan is for a longer list.

Scales by token are handled like rows. A mask is not: its strides follow from T, and its offsets could need 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

from mla_compile.kernels.call import DecodeCall

# The scalars that are set at each launch.
SIZED = ("T", "latent_b", "rope_b", "values_b", "scale_b", "entries", "indices_b", "indices_s")
STEP = 64  # T is rounded up to a multiple of this up to 1024 tokens; above, to an eighth of a power of two
LARGEST = 1 << 20  # larger T are not rounded
_I32 = 1 << 31


class Grown(NamedTuple):
    """The part of a call's rows on which a launch depends, and the part that is set at each launch.

    ``most`` is the number of keys that a query may see, rounded up: T, or the length of its list. ``forms`` are shapes
    and strides, except for what follows from T. ``scalars`` are the values of :data:`SIZED`.
    """

    most: int
    forms: tuple[object, ...]
    scalars: tuple[int, ...]


def rounded(T: int) -> int:
    """The number of tokens for which a call of T tokens is planned."""
    step = max(STEP, 1 << max(0, (T - 1).bit_length() - 4))
    return -(-T // step) * step


def grown(call: DecodeCall) -> Grown | None:
    """How the rows of a call may grow; None if every T is a separate kind of call, or the rows have a wrong shape."""
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
        # The compiler knows which strides are multiples of 16 (not those of scales). Rows of another number of tokens
        # than the latent's are a separate kind, which the checks refuse.
        distance = -1 if outer == T * row else outer
        forms.append((B, tokens == T, width, distance, scales or outer % 16 == 0, row, column))
        scalars.append(outer)
    if call.indices is None:
        return Grown(most, tuple(forms), (*scalars, 0, 0, 0))
    if call.indices.dim() != 3 or call.indices.stride(0) >= _I32:
        return None
    B, S, entries = call.indices.shape
    return Grown(rounded(entries), (*forms, (B, S)), (*scalars, entries, *call.indices.stride()[:2]))
