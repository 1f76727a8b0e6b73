"""Stands for the driver of a GPU: Triton compiles for sm_90, and a launch is recorded instead of being run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeDriver:
    """As much of a driver as Triton asks for on its way to a launch; ``launched`` holds the arguments."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, int, int], int, tuple[Any, ...]]] = []
        self.utils = self

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return (0, 0, 128, 0, 1024)

    def unload_module(self, _: int) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, _: int) -> int:
        return 7

    def launcher_cls(self, source: Any, _: Any) -> Callable[..., None]:
        def go(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            names = source.fn.arg_names
            self.launched.append(((x, y, z), stream, dict(zip(names, rest[-len(names) :], strict=True))))

        return go
