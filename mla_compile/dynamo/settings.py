"""Dynamo settings that hold while an optimized module runs, and nowhere else.

Newer releases of torch keep them per thread, older ones (2.11) per process. In the latter several threads can be inside
at once, so the first one in saves what the last one out restores. ``torch._dynamo.config.patch`` would not do: a thread
that enters second saves our settings as if they were the user's, and leaves them behind for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._dynamo import config

_lock = threading.RLock()


class _Shared:
    """How many are inside, and the values that were there before the first of them."""

    def __init__(self) -> None:
        self.inside = 0
        self.outside: dict[str, Any] = {}


class _OfThread(threading.local, _Shared):
    pass


@contextmanager
def held(wanted: Mapping[str, object]) -> Iterator[None]:
    """Sets ``wanted`` for the block and restores the user's values after it, whatever happens inside."""
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
    """Changes settings from here on; only to be called inside :func:`held`."""
    state = _state()
    with _lock:
        for name, value in wanted.items():
            state.outside.setdefault(name, getattr(config, name))
            setattr(config, name, value)


def user_value(name: str) -> Any:
    """The user's own value of a setting, whether we are inside or not."""
    with _lock:
        return _state().outside.get(name, getattr(config, name))


@cache
def _state() -> _Shared:
    """Where values are saved: per thread if torch keeps settings per thread. It does not say, so we try it, once."""
    changed, seen = threading.Event(), []

    def read() -> None:
        changed.wait()
        seen.append(config.recompile_limit)

    reader = threading.Thread(target=read)
    reader.start()  # before the change, because a thread may start with a copy of the settings
    before = config.recompile_limit
    config.recompile_limit = before + 1
    changed.set()
    reader.join()
    config.recompile_limit = before
    return _Shared() if seen == [before + 1] else _OfThread()
