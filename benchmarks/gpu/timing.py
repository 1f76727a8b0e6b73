"""Timing on a GPU: CUDA graph replays between events, the L2 cache flushed before each, variants in turns.

The cache is flushed by *reading* a large buffer: a written one leaves dirty lines, whose write-back is then measured
with the kernel. Without a GPU (``--dry-run``) calls are timed by the host clock, so that the code around is exercised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Times

Call = Callable[[], Any]


class Clock:
    """Times calls on one device. Sizes shrink on a device that is not CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        l2 = 64 << 20
        if self.cuda:
            l2 = max(l2, getattr(torch.cuda.get_device_properties(device), "L2_cache_size", l2))
        self._sweep = torch.ones(4 * l2 // 4 if self.cuda else 1024, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Evict everything from the L2 cache, leaving clean lines."""
        self._sweep.amax()

    def captured(self, call: Call) -> tuple[Call, bool]:
        """``call`` as the replay of a CUDA graph, and whether it could be captured. Its results stay in place."""
        if not self.cuda:
            call()
            return call, False
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, allocates scratch, fills caches
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                kept = call()
        except RuntimeError:  # a peer that allocates or reads back while it runs is timed as it is
            torch.cuda.synchronize()
            return call, False

        def replay(_: Any = kept) -> Any:
            graph.replay()
            return _

        return replay, True

    def seconds(self, calls: dict[str, Call], rounds: int, budget: float, flush: bool = True) -> dict[str, list[float]]:
        """Each call's seconds per round, in turns; at least 3 rounds, then until ``rounds`` or ``budget`` seconds."""
        end = time.monotonic() + budget
        events: dict[str, list[Any]] = {name: [] for name in calls}
        for index in range(rounds):
            if index >= 3 and time.monotonic() > end:
                break
            for name, call in calls.items():
                events[name].append(self._one(call, flush))
            if self.cuda:
                torch.cuda.synchronize()  # the budget counts time on the device, not in the queue
        if not self.cuda:
            return events
        return {name: [1e-3 * a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}

    def _one(self, call: Call, flush: bool) -> Any:
        if not self.cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if flush:
            self.flush()
        first.record()
        call()
        last.record()
        return first, last

    def wall(
        self, calls: dict[str, Call], rounds: int, budget: float, prepare: Call = lambda: None
    ) -> dict[str, list[float]]:
        """Each call's seconds by the host clock, from an idle device to an idle device: what a caller waits for."""
        end = time.monotonic() + budget
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(rounds):
            if index >= 3 and time.monotonic() > end:
                break
            for name, call in calls.items():
                prepare()
                self._settle()
                start = time.perf_counter()
                call()
                self._settle()
                seconds[name].append(time.perf_counter() - start)
        return seconds

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def median(self, call: Call, rounds: int = 20, budget: float = 1.0, flush: bool = True) -> float:
        """Median seconds of one call."""
        return Times.of(self.seconds({"": call}, rounds, budget, flush)[""]).median / 1e3


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, best and quartiles in microseconds, and their count."""
    found = asdict(Times.of(seconds))
    return {name: value if name == "count" else round(1e3 * value, 3) for name, value in found.items()}


def copy_bandwidth(clock: Clock, size: int = 4 << 30) -> dict[str, float]:
    """Bytes/s of a device-to-device copy, counting bytes read and bytes written."""
    source = torch.empty(size // 4 if clock.cuda else 1 << 18, device=clock.device, dtype=torch.int32).random_()
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4
    return {"bytes_per_s": moved / clock.median(lambda: target.copy_(source), flush=False)}


def read_bandwidth(clock: Clock, size: int = 4 << 30) -> dict[str, float]:
    """Bytes/s of a reduction over a large buffer: nothing is written."""
    source = torch.empty(size // 4 if clock.cuda else 1 << 18, device=clock.device, dtype=torch.float32).normal_()
    return {"bytes_per_s": source.numel() * 4 / clock.median(source.sum, flush=False)}


def matmul_rate(clock: Clock, size: int = 8192) -> dict[str, float]:
    """FLOP/s of a square bfloat16 product of random matrices (zeros run faster and would flatter the card)."""
    size = size if clock.cuda else 64
    a, b = (torch.randn(size, size, device=clock.device).to(torch.bfloat16) for _ in range(2))
    return {"flop_per_s": 2 * size**3 / clock.median(lambda: a @ b, flush=False)}


def empty_graph(clock: Clock) -> dict[str, float]:
    """Microseconds of a graph with one kernel that does nothing worth mentioning: what every timing contains."""
    cell = torch.zeros(1, device=clock.device)
    call, _ = clock.captured(lambda: cell.add_(1))
    return {"us": 1e6 * clock.median(call)}


def host_cost(clock: Clock, call: Call, count: int = 200) -> float:
    """Microseconds of host time per call outside a graph: launches are queued, the device is not waited for."""
    call()
    if clock.cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count if clock.cuda else 3):
        call()
    spent = time.perf_counter() - start
    if clock.cuda:
        torch.cuda.synchronize()
    return 1e6 * spent / (count if clock.cuda else 3)


def release(*_: Tensor) -> None:
    """Give cached memory back before a large allocation."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
