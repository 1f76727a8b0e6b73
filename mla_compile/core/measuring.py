"""Measurement: describes the machine, times calls in turns, and computes statistics of the times."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_compile.errors import InputError
from mla_compile.version import __version__


def machine() -> dict[str, Any]:
    """Return the facts that measurements depend on, such as the processor, threads and versions, and the date."""
    return {
        "cpu": _cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mla_compile": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def available_bytes(device: torch.device | None = None) -> int:
    """Return the free bytes of a CUDA device, or of main memory without swapping.

    If the machine does not report its free memory, half of its total memory is returned.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def require_compiler() -> None:
    """Raise :class:`InputError` if Inductor, the baseline of all comparisons, finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # imported on use: loads all of Inductor
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise InputError(
            "torch finds no C++ compiler, and Inductor, which this compares with, needs one: "
            "install g++, or name one in CXX"
        ) from None


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(
    calls: Mapping[str, Callable[[], float]],
    rounds: int,
    budget_s: float,
    least: int = 3,
    times: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Run ``calls`` in turns, so that a disturbance affects all calls. Return the seconds that each call reports.

    The turns end after ``rounds`` rounds, or once ``budget_s`` seconds are spent and every call ran ``least`` times.
    Each result is added to ``times`` at once, so that interrupted callers have it.
    """
    times = {} if times is None else times
    times.update({name: [] for name in calls})
    end = time.perf_counter() + budget_s
    for index in range(rounds):
        if index >= least and time.perf_counter() > end:
            break
        for name, call in calls.items():
            times[name].append(call())
    return times


@dataclass(frozen=True)
class Times:
    """Statistics of one variant's times in milliseconds. ``low`` and ``high`` are quartiles."""

    median: float
    best: float
    low: float
    high: float
    count: int
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Return the statistics of one or more measurements, given in seconds."""
        ms = sorted(1e3 * s for s in seconds)
        if len(ms) == 1:
            return cls(ms[0], ms[0], ms[0], ms[0], 1, ms[0], ms[0])
        low, _, high = statistics.quantiles(ms, n=4)
        # "inclusive" keeps the deciles within the measured range, however few the samples are.
        tenths = statistics.quantiles(ms, n=10, method="inclusive")
        return cls(statistics.median(ms), ms[0], low, high, len(ms), tenths[0], tenths[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of a/b over the rounds. Each ratio compares values of the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
