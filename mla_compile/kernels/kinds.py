"""Decides which calls can use the same compiled launch although a growing cache changes their number of tokens.

The number of tokens T is a scalar argument of the attention kernels. In a dense cache, the strides between requests
also depend on T. Everything else that depends on T is decided by the plan. A plan for more tokens also works for fewer
tokens, because the splits past the last tile are then empty. Calls are therefore planned, compiled and bound for
T rounded up, and each launch gets the actual T.

The index lists of a short cache may grow with the cache. Each launch then also gets the length of the lists, and the
plan is for longer lists.

Per-token scales are handled like rows. Masks are different: with a mask, every T is a separate kind of call, because
the mask's strides depend on T, and offsets into the mask could need 64 bits.
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
    """The properties of a call's rows that determine a launch, and the numbers that are set at each launch.

    ``most`` is the number of keys per query, rounded up: T, or the length of an index list. ``forms`` holds the shapes
    and strides that do not depend on T. ``scalars`` holds the values of :data:`SIZED`.
    """

    most: int
    forms: tuple[object, ...]
    scalars: tuple[int, ...]


def rounded(T: int) -> int:
    """Round T up to the number of tokens for which a call is planned.

    Above 1024 tokens, the step is an eighth of the largest power of two below T.
    """
    step = max(STEP, 1 << max(0, (T - 1).bit_length() - 4))
    return -(-T // step) * step


def grown(call: DecodeCall) -> Grown | None:
    """Describe rows that may grow. Return None if every T is a separate kind of call, or a shape is wrong."""
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
        # The compiled code depends on which strides are multiples of 16, except for the strides of scales. If tensors
        # differ in their number of tokens, the call is a separate kind, which the checks refuse.
        distance = -1 if outer == T * row else outer
        forms.append((B, tokens == T, width, distance, scales or outer % 16 == 0, row, column))
        scalars.append(outer)
    if call.indices is None:
        return Grown(most, tuple(forms), (*scalars, 0, 0, 0))
    if call.indices.dim() != 3 or call.indices.stride(0) >= _I32:
        return None
    B, S, entries = call.indices.shape
    return Grown(rounded(entries), (*forms, (B, S)), (*scalars, entries, *call.indices.stride()[:2]))
