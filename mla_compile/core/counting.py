"""Process-wide counters and distributions, which :func:`mla_compile.metrics` exposes."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One metric: its meaning, its labels, and, for a distribution, the bounds of its buckets in seconds."""

    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
KINDS: Mapping[str, Metric] = {
    # Names as in vLLM.
    "prompt_tokens": Metric("Tokens of the prompts of requests that were taken."),
    "generation_tokens": Metric("Tokens that were generated."),
    "num_preemptions": Metric("Requests that were put back because the pool was full, and read again what they had."),
    "request_success": Metric("Requests that ended: by stop, length, error, abort.", ("finished_reason",)),
    "time_to_first_token_seconds": Metric("From the arrival of a request to its first token.", bounds=_FIRST),
    "inter_token_latency_seconds": Metric("From one token of a request to its next.", bounds=_NEXT),
    "e2e_request_latency_seconds": Metric("From the arrival of a request to its last token.", bounds=_FIRST),
    # Names of mla_compile's own.
    "compilations": Metric("Graphs that code was made for, by what they compute.", ("graph",)),
    "fallbacks": Metric("What ran in a slower way than was meant, by the reason.", ("reason",)),
    "kernels": Metric("Kernels for CPU that were loaded: native, or torch's operators.", ("kind",)),
    "refused_requests": Metric("Requests over HTTP that were refused, by status.", ("status",)),
    "sites": Metric("Attentions of the graphs that were rewritten, by what became of them.", ("became",)),
}


class _Distribution:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


_lock = threading.Lock()
_counts: dict[str, dict[Labels, float]] = {}
_distributions: dict[str, _Distribution] = {}


def count(name: str, by: float = 1, **labels: str) -> None:
    """Add ``by`` to the counter ``name`` of :data:`KINDS`."""
    key = tuple(sorted(labels.items()))
    with _lock:
        of = _counts.setdefault(name, {})
        of[key] = of.get(key, 0) + by


def observe(name: str, seconds: float) -> None:
    """Add a value to the distribution ``name``."""
    with _lock:
        _distributions.setdefault(name, _Distribution(KINDS[name].bounds)).add(seconds)


def counted() -> dict[str, dict[Labels, float]]:
    """Return the counters: name -> labels -> count."""
    with _lock:
        return {name: dict(of) for name, of in _counts.items()}


def distributed() -> dict[str, tuple[list[tuple[float, int]], float]]:
    """Return the distributions by name.

    Each has (bound, count of values up to the bound) pairs and the sum of all values, in seconds.
    """
    with _lock:
        return {name: (_up_to(one), one.sum) for name, one in _distributions.items()}


def _up_to(one: _Distribution) -> list[tuple[float, int]]:
    total, found = 0, list[tuple[float, int]]()
    for bound, n in zip((*one.bounds, float("inf")), one.counts, strict=True):
        total += n
        found.append((bound, total))
    return found
