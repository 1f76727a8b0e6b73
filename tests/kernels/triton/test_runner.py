"""A step as a function: how it is launched with a profiler, and with a Triton of other internals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_compile.kernels import launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.triton import runner
from tests.support.fake_driver import FakeDriver


def test_a_triton_of_other_internals_is_used_by_its_normal_entry(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise TypeError("ASTSource takes 7 arguments")

    rows = torch.zeros(2, 300, 40, dtype=torch.bfloat16)
    given = DecodeCall(torch.zeros(2, 1, 4, 40, dtype=torch.bfloat16), rows[..., :32], rows[..., 32:], scale=0.5)
    launch.launch(given)
    monkeypatch.setattr(runner, "_compile", broken)
    launch.clear()
    launch.launch(given)
    (grid, _, bound), (normal_grid, _, normal) = driver.launched
    assert grid == normal_grid
    for name, value in bound.items():
        if name not in ("out", "lse"):
            got = normal[name]
            assert (got.data_ptr() if hasattr(got, "data_ptr") else got) == value, name


class Loaded:
    """Stands for a compiled kernel: tells which way it was launched."""

    function, packed_metadata = 7, (8,)

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.seen.append(("entry", grid, stream, arguments))

    def run(self, *given: Any) -> None:
        self.seen.append(("run", *given))


def test_a_bound_launch_tells_profilers_only_where_there_is_one():
    pytest.importorskip("triton")
    from triton import knobs

    kernel = Loaded()
    go = runner.bind(kernel, (1, 2, 3))
    go(5, [10, 11])
    knobs.runtime.launch_enter_hook.add(print)
    try:
        go(5, [10, 11])
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    direct = ("run", 1, 2, 3, 5, 7, (8,), None, None, None, 10, 11)
    assert kernel.seen == [direct, ("entry", (1, 2, 3), 5, (10, 11))]
