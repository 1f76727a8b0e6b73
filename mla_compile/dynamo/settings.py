"""Sets Dynamo settings while an optimized module runs, and only then.

Newer releases of torch keep the settings per thread, older ones (2.11) per process. If they are per process, several
threads can be inside at once, so the first one to enter saves the values that the last one to leave restores.
``torch._dynamo.config.patch`` would not work: a thread that enters second would save our settings as if they were the
user's, and would leave them set.
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
    """The number of callers inside, and the settings before the first of them entered."""

    def __init__(self) -> None:
        self.inside = 0
        self.outside: dict[str, object] = {}


class _OfThread(threading.local, _Nesting):
    pass


@contextmanager
def held(wanted: Mapping[str, object]) -> Iterator[None]:
    """Set ``wanted`` for the block, and restore the user's values after it, whatever happens inside."""
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
    """Change settings from here on; call it only inside :func:`held`."""
    state = _state()
    with _lock:
        for name, value in wanted.items():
            state.outside.setdefault(name, getattr(config, name))
            setattr(config, name, value)


def user_value(name: str) -> Any:
    """The user's own value of a setting, inside :func:`held` and outside."""
    with _lock:
        return _state().outside.get(name, getattr(config, name))


@cache
def _state() -> _Nesting:
    """The saved values: per thread if torch keeps settings per thread, which is tested once."""
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
    return _Nesting() if seen == [before + 1] else _OfThread()
