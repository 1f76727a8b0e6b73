"""Replace an attribute of torch for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def instead(owner: object, name: str, value: object) -> Iterator[None]:
    """Within the block, set ``owner.name`` to ``value`` for all threads. The caller must hold Dynamo's lock."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
