"""The current load of all managers in this process, and all counters (:func:`metrics`)."""

from __future__ import annotations

import weakref
from typing import Any

from mla_compile.core.counting import KINDS, counted, distributed

GAUGES = {
    "num_requests_running": "Requests that take part in the next step.",
    "num_requests_waiting": "Requests that wait for room in a step or in the pool.",
    "kv_cache_usage_perc": "The share of the pools that requests hold, from 0 to 1.",
}
_managers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(manager: object) -> None:
    """Include this manager's requests and pages in the figures."""
    _managers.add(manager)


def gauges() -> dict[str, float]:
    """Return the current figures by name."""
    running = waiting = pages = held = 0
    for manager in list(_managers):
        processor = manager.batch_processor
        if processor is None:
            continue
        scheduler, blocks = processor.scheduler, processor.cache.num_blocks
        active = len(scheduler.active_requests)
        running, waiting = running + active, waiting + max(0, len(manager.output_router) - active)
        pages, held = pages + blocks, held + blocks - processor.cache.unheld()
    return {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": held / pages if pages else 0.0,
    }


def metrics() -> dict[str, Any]:
    """Return the figures that ``mla-compile serve`` shows at ``/metrics``, counted in this process.

    Returns:
        A value per name: a number, a dict from label ("stop", "length") to number, or a distribution. A distribution is
            a dict of "count", "sum" (s), and "buckets", which maps each bound (s) to the number of values up to it.
    """
    found: dict[str, object] = dict(gauges())
    counts, distributions = counted(), distributed()
    for name, kind in KINDS.items():
        if kind.bounds:
            buckets, total = distributions.get(name, ([(float("inf"), 0)], 0.0))
            found[name] = {"count": buckets[-1][1], "sum": total, "buckets": dict(buckets)}
        elif kind.labels:
            of = counts.get(name, {})
            found[name] = {", ".join(value for _, value in labels): int(number) for labels, number in of.items()}
        else:
            found[name] = int(counts.get(name, {}).get((), 0))
    return found
