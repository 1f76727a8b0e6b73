"""The description of a GPU."""

from __future__ import annotations

import pytest
import torch

from mla_compile.kernels import devices
from mla_compile.kernels.devices import PRESETS, Device

KB = 1024


def test_device_of_cuda_is_read_once_and_falls_back_where_torch_reports_less(monkeypatch):
    calls = []

    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    def properties(index):
        calls.append(index)
        return Properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    devices._cuda_device.cache_clear()
    try:
        got = [Device.of(torch.device("cuda", 0)) for _ in range(3)]
        Properties.shared_memory_per_block_optin = 232448
        Properties.memory_clock_rate, Properties.memory_bus_width = 3201000, 6144
        more = Device.of(torch.device("cuda", 1))
    finally:
        devices._cuda_device.cache_clear()
    assert got == [Device("NVIDIA H200", (9, 0), 132, 227 * KB, 4.3e12)] * 3
    assert calls == [0, 1]
    assert more.smem == 232448
    assert more.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert Device.of(torch.device("cpu")) is PRESETS["sm_80"]


@pytest.mark.parametrize("device", PRESETS.values(), ids=PRESETS)
def test_what_a_preset_has_is_what_the_plan_needs(device):
    """A lone block on each SM nearly keeps the memory busy: were it far off, the paces or the bandwidth were wrong."""
    assert device.bandwidth
    under_way = device.bandwidth / device.sms * 1e-6 * device.pace.latency  # bytes for each SM, Little's law
    assert 5 * KB < under_way < 64 * KB
    assert 0.2 < 38 * device.pace.link + device.pace.step < 2.0
    assert devices.preset((device.capability[0], device.capability[1] + 9)).pace
