"""Which calls of different numbers of tokens are launched alike, so that a growing cache is a kind of call, not many.

The number of tokens T is a scalar of the attention kernels, and so is the distance between the rows of two requests,
which grows with T where the requests lie behind each other. All else that follows from T is decided by the plan, and a
plan for more tokens serves fewer: splits past the last tile are empty, as they are for a request that is shorter than
the cache. So calls are planned, compiled and bound for T rounded up, and told T itself when they are launched.

While a cache holds fewer tokens than a query may choose, the lists of chosen keys grow with it: their length is told
too, and the plan is for a longer one.

Scales by token are rows of their own. Not so with a mask, whose own sizes follow from T, and where offsets could need
64 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_compile.kernels.call import DecodeCall

# The scalars that a launch is told.
SIZED = ("T", "latent_b", "rope_b", "values_b", "scale_b", "entries", "indices_b", "indices_s")
STEP = 64  # tokens to which T is rounded up, up to 1024; from there on to an eighth of a power of two
LARGEST = 1 << 20  # tokens up to which it is rounded
_I32 = 1 << 31


class Grown(NamedTuple):
    """Of the rows of a call: what a launch depends on, and what it is told.

    ``most`` is the number of keys that a query may see, rounded up: T, or the length of its list. ``forms`` are shapes
    and strides as far as they do not follow from T, ``scalars`` the values of :data:`SIZED`.
    """

    most: int
    forms: tuple[Any, ...]
    scalars: tuple[int, ...]


def rounded(T: int) -> int:
    """T rounded up to what a call of T tokens is planned for."""
    step = max(STEP, 1 << max(0, (T - 1).bit_length() - 4))
    return -(-T // step) * step


def grown(call: DecodeCall) -> Grown | None:
    """How the rows of a call may grow; None where every T is a kind of its own, or the rows are none."""
    if call.mask is not None or call.block_table is not None:
        return None
    latent = call.latent
    if latent.dim() != 3 or not 1 < (T := latent.shape[1]) <= LARGEST:
        return None
    most = rounded(T)
    forms: list[tuple[Any, ...] | None] = []
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
        # The compiler is told of multiples of 16 (not of scales). Rows of unequal tokens are a kind that checks refuse.
        distance = -1 if outer == T * row else outer
        forms.append((B, tokens == T, width, distance, scales or outer % 16 == 0, row, column))
        scalars.append(outer)
    if call.indices is None:
        return Grown(most, tuple(forms), (*scalars, 0, 0, 0))
    if call.indices.dim() != 3 or call.indices.stride(0) >= _I32:
        return None
    B, S, entries = call.indices.shape
    return Grown(rounded(entries), (*forms, (B, S)), (*scalars, entries, *call.indices.stride()[:2]))
