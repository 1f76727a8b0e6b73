"""Pauses Python's cycle collector while a deep model is traced and rewritten.

Tracing makes and keeps millions of small objects. The collector would respond by scanning all objects of the process,
torch's own included, again and again, and find nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """The number of pauses in effect, and whether the collector was enabled before the first of them."""

    inside = 0
    ran = False


_lock = threading.Lock()


def pause() -> None:
    """Disable the cycle collector until :func:`resume` ends every pause. Reference counting continues."""
    with _lock:
        if not _State.inside:
            _State.ran = gc.isenabled()
            gc.disable()
        _State.inside += 1


def resume() -> None:
    """End one pause. After the last pause, the collector is enabled again if it was enabled before the first."""
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
