"""Recognize Python indices that take a slice of one axis."""

from __future__ import annotations

from typing import Any


def range_of(index: Any, rank: int, axis: int) -> slice | None:
    """Return the slice of step 1 that ``index`` takes of ``axis`` alone; ``None`` for any other index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(p is not Ellipsis and not isinstance(p, slice) for p in parts) or parts.count(Ellipsis) > 1:
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    parts += [slice(None)] * (rank - len(parts))
    bounds = [b for p in parts for b in (p.start, p.stop, p.step)]
    whole = all(p == slice(None) for k, p in enumerate(parts) if k != axis)
    if len(parts) != rank or not whole or any(type(b) not in (int, type(None)) for b in bounds):
        return None
    one: slice = parts[axis]
    return one if one.step in (None, 1) else None
