"""The figures of :func:`mla_compile.metrics` in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from mla_compile.batching.figures import GAUGES, gauges
from mla_compile.core.counting import KINDS, counted, distributed

PREFIX = "mla_compile:"


class _Figures:
    def collect(self) -> Iterator[Metric]:
        for name, value in gauges().items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], value=value)
        counts, distributions = counted(), distributed()
        for name, kind in KINDS.items():
            if kind.bounds:
                values, total = distributions.get(name, ([(float("inf"), 0)], 0.0))
                told = [("+Inf" if bound == float("inf") else str(bound), n) for bound, n in values]
                yield HistogramMetricFamily(PREFIX + name, kind.meaning, buckets=told, sum_value=total)
                continue
            found = counts.get(name, {} if kind.labels else {(): 0.0})
            family = CounterMetricFamily(PREFIX + name, kind.meaning, labels=kind.labels)
            for labels, value in found.items():
                family.add_metric([dict(labels).get(label, "") for label in kind.labels], value)
            yield family


@cache
def registry() -> CollectorRegistry:
    """Return a registry for the server's figures. Other libraries use the process-wide registry."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_Figures())
    return made
