"""How much a function does, in calls of Python: on a busy machine its seconds say little."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any


def counted(function: Callable[..., Any], counts: Counter[CodeType]) -> Callable[..., Any]:
    """``function``, whose calls add to the counts how often any code ran in them."""

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    def counting(*args: Any, **kwargs: Any) -> Any:
        outer = sys.getprofile()
        sys.setprofile(count)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(outer)

    return counting
