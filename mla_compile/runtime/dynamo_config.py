"""Settings of Dynamo that hold while a module of ours runs, and nowhere else.

They belong to a thread in newer releases of torch, and to the process in older ones (2.11). There several threads can
be inside at a time: the first one in remembers what the last one out restores. ``torch._dynamo.config.patch`` would
leave a setting behind for good, when the second restores what it found.
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
    """What is remembered while somebody is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.outside: dict[str, Any] = {}


class _OfThread(threading.local, _Shared):
    pass


@contextmanager
def held(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Settings as ``wanted`` inside, the user's afterwards, whatever happens inside."""
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


def change(wanted: Mapping[str, Any]) -> None:
    """Other settings from here on, to be called inside :func:`held` only."""
    state = _state()
    with _lock:
        for name, value in wanted.items():
            state.outside.setdefault(name, getattr(config, name))
            setattr(config, name, value)


def users(name: str) -> Any:
    """The user's value of a setting, inside and outside."""
    with _lock:
        return _state().outside.get(name, getattr(config, name))


@cache
def _state() -> _Shared:
    """Where to remember: per thread where settings are per thread. torch does not say, so it is tried, once."""
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
