"""A launch without a GPU, and CPU operators with and without the native kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_compile.kernels import launch
from mla_compile.kernels.cpu import native
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


@pytest.fixture(params=["native", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes an operator on a CPU."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no native kernel here")
    return str(request.param)
