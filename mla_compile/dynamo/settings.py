"""Sets Dynamo settings while an optimized module runs, and only then.

Newer releases of torch keep the settings per thread, older releases (2.11) per process. If they are per process,
several threads may run optimized modules at once. The first thread to start then saves the user's values, and the last
thread to finish restores them. ``torch._dynamo.config.patch`` would not work: the second thread would take the values
from :func:`held` for the user's values, and would leave them set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._dynamo import config

_lock = threading.RLock()


class _Nesting:
    """The number of open :func:`held` contexts, and the settings before the first of them."""

    def __init__(self) -> None:
        self.inside = 0
        self.outside: dict[str, object] = {}


class _OfThread(threading.local, _Nesting):
    pass


@contextmanager
def held(wanted: Mapping[str, object]) -> Iterator[None]:
    """Within this context, set ``wanted``. The user's values are restored afterwards, also after an exception."""
    state = _state()
    with _lock:
        state.inside += 1
        change(wanted)
    try:
        yield
    finally:
        with _lock:
            state.inside -= 1
            if not state.inside:
                for name, value in state.outside.items():
                    setattr(config, name, value)
                state.outside.clear()


def change(wanted: Mapping[str, object]) -> None:
    """Change settings until the outermost :func:`held` ends. Call this only inside :func:`held`."""
    state = _state()
    with _lock:
        for name, value in wanted.items():
            state.outside.setdefault(name, getattr(config, name))
            setattr(config, name, value)


def user_value(name: str) -> Any:
    """Return the user's own value of a setting. This works inside and outside of :func:`held`."""
    with _lock:
        return _state().outside.get(name, getattr(config, name))


@cache
def _state() -> _Nesting:
    """Return the saved values, per thread if torch keeps settings per thread. This is tested once."""
    changed, seen = threading.Event(), []

    def read() -> None:
        changed.wait()
        seen.append(config.recompile_limit)

    reader = threading.Thread(target=read)
    reader.start()  # before the setting is changed, because a new thread may get a copy of the settings
    before = config.recompile_limit
    config.recompile_limit = before + 1
    changed.set()
    reader.join()
    config.recompile_limit = before
    return _Nesting() if seen == [before + 1] else _OfThread()
