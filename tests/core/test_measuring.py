"""Calls in turns, and what is said about their times."""

from __future__ import annotations

import math

import pytest

from mla_compile.core.measuring import Times, in_turns


def test_turns_are_kept_when_one_fails():
    """Whole rounds before an interruption are with the caller."""
    times: dict[str, list[float]] = {}
    order = iter([1.0, 2.0, 3.0])
    with pytest.raises(StopIteration):
        in_turns({"a": lambda: next(order), "b": lambda: next(order)}, rounds=5, budget_s=1.0, times=times)
    assert times == {"a": [1.0, 3.0], "b": [2.0]}


def test_times_of_one_and_of_many():
    one = Times.of([0.002])
    assert (one.median, one.p10, one.p90, one.count) == (2.0, 2.0, 2.0, 1)
    many = Times.of([i / 1000 for i in range(1, 12)])
    assert (many.best, many.p10, many.median, many.p90, many.count) == (1.0, 2.0, 6.0, 10.0, 11)
    assert all(math.isfinite(x) for x in (many.low, many.high))
