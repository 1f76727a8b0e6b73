"""Decode state that changes in every step is compiled once, within Dynamo's limit for each layer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from mla_compile import MlaCompileWarning, optimize
from tests.support.decode_state import OPTIONS, absorbed_runs, seen_settings
from tests.support.tiers import also, full
from tests.support.unsettled import (
    ByIndex,
    GrowingBuffer,
    IntPosition,
    Layers,
    ListOfTokens,
    Periodic,
    ReadBeforeWritten,
)


@pytest.mark.parametrize(
    ("make", "count", "each_step", "graphs"),
    [
        (GrowingBuffer, 8, 1, [1, 1]),
        (IntPosition, 8, 1, [1, 1]),
        *also(
            "combination",
            (Periodic, 24, 1, [1, 1, 1]),
            (lambda: Layers(IntPosition, 2), 12, 1, [2, 2]),
            (lambda: Layers(GrowingBuffer, 2, breaks=True), 12, 2, [1, 1]),
        ),
    ],
    ids=["buffer", "int", "periodic", "ints_of_layers", "buffers_of_layers_apart"],
)
def test_what_changes_in_every_step_is_compiled_once(
    make: Any, count: int, each_step: int, graphs: list[int], runs: list[int]
) -> None:
    model, before = make().eval(), seen_settings()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absorbed_runs(fast, model, runs, count) == [each_step] * (count + 1)
    assert [report.absorbed for report in fast.forward.compiler.reports] == graphs
    assert seen_settings() == before


def test_layers_that_run_one_code_do_not_use_up_each_others_limit(runs: list[int]) -> None:
    model = Layers(ByIndex, 2, breaks=True).eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = seen_settings()
        assert absorbed_runs(fast, model, runs, count=3) == [2] * 4
        assert seen_settings() == before
    assert fast.mla_report.absorbed == 2 * 2


@full("combination")  # a list that grows, as in test_monitor.py, beside a layer that settles
def test_a_layer_that_never_settles_costs_the_others_nothing(runs: list[int]) -> None:
    model = Layers(lambda index: (ByIndex, ListOfTokens)[index](index), 2, breaks=True).eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(MlaCompileWarning, match=r"resume_in_one.* runs it uncompiled"),
    ):
        assert absorbed_runs(fast, model, runs, count=4) == [2, 2, 1, 1, 1]


def test_a_buffer_that_was_seen_in_several_sizes_is_no_weight(runs: list[int]) -> None:
    model = ReadBeforeWritten().eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with pytest.warns(MlaCompileWarning, match="nothing was absorbed"):  # the first graph takes it for one
        assert absorbed_runs(fast, model, runs, count=4) == [0, 1, 1, 1, 1]
