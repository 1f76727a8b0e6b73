"""The properties of a GPU that a launch plan needs, read once per device, and presets for planning without a GPU.

Every number in the plan's formula that depends on the card is in this file, with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

_KB = 1024


class Pace(NamedTuple):
    """The latencies of one block, in microseconds. They do not depend on the other blocks.

    latency  from the request for a tile until its last byte arrives, if the memory is busy. To keep it busy, latency
             times bandwidth bytes must be in flight (Little's law): 4.3 MB on an H200, 33 KB per SM
    link     one of the chained MMA instructions, over 16 columns. Each adds to the sum of the previous instruction
    step     everything else in a tile: softmax, exchanges between warps, barriers
    """

    latency: float
    link: float
    step: float


@dataclass(frozen=True)
class Device:
    """A GPU. ``smem`` is the maximum dynamic shared memory per block in bytes, ``bandwidth`` is in bytes/s.

    If ``bandwidth`` or ``pace`` is unknown (None), the plan uses the value of the preset.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    smem: int
    bandwidth: float | None = None
    pace: Pace | None = None

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Return the description of a CUDA device. For other devices (Triton's interpreter), return an A100's."""
        if device.type != "cuda":
            return PRESETS["sm_80"]
        return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


# Shared memory: CUDA programming guide, technical specifications per compute capability. SMs and bandwidth: the
# vendors' datasheets, except for the H200's bandwidth, which we measured with a copy. The paces are estimates, to be
# fitted by benchmarks/gpu/tune.py. The latency is taken as one microsecond. At the card's boost clock, a link takes 33
# cycles (a chained mma.sync m16n8k16), and a step 940 cycles (counted from the instructions).
# mla_compile/onnx/csrc/plan.c has a copy of the bandwidths and paces.
PRESETS = {
    "sm_80": Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * _KB, 2.0e12, Pace(1.0, 0.0234, 0.67)),
    "sm_86": Device("NVIDIA A10", (8, 6), 72, 99 * _KB, 0.6e12, Pace(1.0, 0.0195, 0.55)),
    "sm_89": Device("NVIDIA L40S", (8, 9), 142, 99 * _KB, 0.86e12, Pace(1.0, 0.0131, 0.37)),
    "sm_90": Device("NVIDIA H200", (9, 0), 132, 227 * _KB, 4.3e12, Pace(1.0, 0.0188, 0.54)),
    "sm_100": Device("NVIDIA B200", (10, 0), 148, 227 * _KB, 8.0e12, Pace(1.0, 0.0178, 0.51)),
    "sm_120": Device("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * _KB, 1.8e12, Pace(1.0, 0.0137, 0.39)),
}


def preset(capability: tuple[int, int]) -> Device:
    """Return the newest preset that is not newer than ``capability``, or the oldest preset if all are newer."""
    older = [d for d in PRESETS.values() if d.capability <= capability]
    return max(older or [PRESETS["sm_80"]], key=lambda d: d.capability)


@lru_cache(maxsize=64)
def _cuda_device(index: int) -> Device:
    found: torch._C._CudaDeviceProperties = torch.cuda.get_device_properties(index)
    capability = (int(found.major), int(found.minor))
    like = preset(capability)
    smem = int(getattr(found, "shared_memory_per_block_optin", like.smem))
    # Only recent versions of torch report clock and bus. The clock is in kHz, and memory transfers twice per cycle.
    clock, bus = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    bandwidth = 2e3 * clock * bus / 8 if clock and bus else like.bandwidth
    return Device(str(found.name), capability, int(found.multi_processor_count), smem, bandwidth)
