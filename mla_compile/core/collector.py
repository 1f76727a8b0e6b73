"""Python's collector of cycles, out of the way while a deep model is traced and rewritten.

Millions of small objects are made and kept then. The collector takes that for a reason to look through all objects of
the process, torch's own included, again and again, and finds nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """How many are inside, and whether the collector ran before the first of them."""

    inside = 0
    ran = False


_lock = threading.Lock()


def pause() -> None:
    """No cycles are collected until as many have called :func:`resume`; counted references are, as always."""
    with _lock:
        if not _State.inside:
            _State.ran = gc.isenabled()
            gc.disable()
        _State.inside += 1


def resume() -> None:
    """The end of what :func:`pause` began; whoever had switched the collector off finds it off."""
    with _lock:
        _State.inside -= 1
        if not _State.inside and _State.ran:
            gc.enable()


@contextmanager
def paused() -> Iterator[None]:
    """Cycles are not collected within the block."""
    pause()
    try:
        yield
    finally:
        resume()
