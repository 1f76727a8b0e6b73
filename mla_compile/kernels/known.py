"""Look-up tables of kinds of calls: each kind is checked once, because the checks take longer than a small product."""

from __future__ import annotations

from typing import Any, TypeVar

_Value = TypeVar("_Value")
REMEMBERED = 1024
"""The maximum number of entries in each table. Otherwise many different lengths would fill the memory."""


def forms(*tensors: Any) -> tuple[object, ...]:
    """Return what checks read of each tensor or None: shape, strides, dtype and device. Sizes must not be symbolic."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def remember(known: dict[object, _Value], kind: object, value: _Value) -> _Value:
    """Store the value of a kind, and return it. A full table is emptied first."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[kind] = value
    return value
