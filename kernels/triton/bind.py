"""A compiled Triton kernel as a function of a stream and its arguments, without what Triton's own entry does each time.

That entry collects metadata for profilers and calls their hooks, also where nobody listens, and passes all arguments on
three times; these kernels have some 70. With a profiler attached it is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bind(kernel: Any, grid: tuple[int, int, int]) -> Callable[[int, list[Any]], None]:
    """``go(stream, arguments)``; loads the kernel on the current device.

    Raises AttributeError or ImportError where this Triton has other internals than 3.6 and 3.7.
    """
    from triton import knobs

    hooks = knobs.runtime
    entry = kernel[grid]
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata

    def go(stream: int, arguments: list[Any]) -> None:
        if _heard(hooks.launch_enter_hook) or _heard(hooks.launch_exit_hook):
            entry(*arguments, stream=stream)
        else:
            run(*grid, stream, function, packed, None, None, None, *arguments)

    return go


def _heard(hook: Any) -> bool:
    """Whether a hook is set: Triton has chains of them, which may be empty, and a caller may put a function there."""
    return bool(getattr(hook, "calls", hook))
