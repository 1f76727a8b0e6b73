"""Pauses Python's cycle collector while a deep model is traced and rewritten.

Tracing makes and keeps millions of small objects. Without a pause, the collector would scan all objects of the process
again and again, and find no garbage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """The number of pauses in effect, and whether the collector was enabled before the first pause."""

    inside = 0
    ran = False


_lock = threading.Lock()


def pause() -> None:
    """Disable the cycle collector until every pause has ended. Reference counting continues."""
    with _lock:
        if not _State.inside:
            _State.ran = gc.isenabled()
            gc.disable()
        _State.inside += 1


def resume() -> None:
    """End one pause. The end of the last pause restores the collector's state from before the first pause."""
    with _lock:
        _State.inside -= 1
        if not _State.inside and _State.ran:
            gc.enable()


@contextmanager
def paused() -> Iterator[None]:
    """Pause the cycle collector for the block."""
    pause()
    try:
        yield
    finally:
        resume()
