"""A launch without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_compile.kernels import launch
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.triton import runner
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    fake = FakeDriver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(runner, "_compiled", {})
    monkeypatch.setattr(hopper_runner, "_compiled", {})
    launch.clear()
    yield fake
    launch.clear()
