"""One attribute of torch, replaced while something of it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def instead(owner: object, name: str, value: object) -> Iterator[None]:
    """``owner.name`` is ``value`` within the block. For who holds Dynamo's lock: the whole process sees it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
