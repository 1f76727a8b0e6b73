"""Figures that everybody adds to."""

from __future__ import annotations

import pytest

from mla_compile.core import counting


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_counts", {})
    monkeypatch.setattr(counting, "_distributions", {})


def test_counts_by_label() -> None:
    counting.count("fallbacks", reason="a")
    counting.count("fallbacks", 2, reason="b")
    counting.count("fallbacks", reason="a")
    counting.count("prompt_tokens", 7)
    by_reason = {(("reason", "a"),): 2, (("reason", "b"),): 2}
    assert counting.counted() == {"fallbacks": by_reason, "prompt_tokens": {(): 7}}


def test_a_distribution_counts_what_is_up_to_each_bound() -> None:
    name = "inter_token_latency_seconds"
    bounds = counting.KINDS[name].bounds
    for seconds in (bounds[0], bounds[0] * 1.01, bounds[-1] * 2):  # a bound belongs to its bucket
        counting.observe(name, seconds)
    ((buckets, total),) = counting.distributed().values()
    assert buckets[0] == (bounds[0], 1)
    assert buckets[1] == (bounds[1], 2)
    assert buckets[-2:] == [(bounds[-1], 2), (float("inf"), 3)]
    assert total == pytest.approx(bounds[0] * 2.01 + bounds[-1] * 2)
