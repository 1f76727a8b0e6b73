"""Leaves messages that libraries log once per process (``logger.warning_once``) out of compiled code.

Dynamo breaks the graph at each call of a logger. A break within an attention prevents its absorption, even if the
message is logged only once. A call that logs every time is part of the model's behaviour, so it still breaks the graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from types import MethodType

from torch._dynamo import config

SETTING = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
"""The Dynamo setting for functions whose calls compiled code omits. torch 2.11 uses the second name."""


class SaidOnce(set[Callable[..., object]]):
    """The user's set of functions to omit. It also contains every logger method that logs a message only once.

    ``on_met`` is called with the names of the logger and the method. If a release of torch does not use ``in`` on this
    set, such methods break the graph as before.
    """

    def __init__(self, functions: Iterable[Callable[..., object]], on_met: Callable[[str, str], object]) -> None:
        super().__init__(functions)
        self.on_met = on_met

    def __contains__(self, method: object) -> bool:
        if super().__contains__(method):
            return True
        if not isinstance(method, MethodType) or not isinstance(method.__self__, logging.Logger):
            return False
        # A logger method returns nothing, so a cache around it only serves to log each message once.
        if not isinstance(method.__func__, functools._lru_cache_wrapper):
            return False
        self.on_met(method.__self__.name, getattr(method.__func__, "__name__", "a method"))
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return set, (list(self),)  # torch copies its settings to write them into its own logs
