"""Generated attentions with generated quantization: as near the dequantized model in float64 as the original is.

``MLA_PROPERTY_QUANTIZED`` sets how many are drawn (8 by default), ``MLA_PROPERTY_SEED`` draws others:
``MLA_PROPERTY_QUANTIZED=500 MLA_PROPERTY_SEED=1 pytest tests/test_property_quantized.py``.
"""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from mla_compile.errors import MlaCompileWarning
from tests.support.generated_quantized import Quantized, QuantizedMLA, quantized
from tests.support.generated_run import options_of, side_by_side
from tests.support.generator import Case, check_each
from tests.support.tiers import also

CASES = int(os.environ.get("MLA_PROPERTY_QUANTIZED", "8"))
SEED = int(os.environ.get("MLA_PROPERTY_SEED", "0"))
PARTS = 8
ALLOWED, ULP = 1.5, 2  # as in the check of a site: errors of the original, and units in the last place
OUTLIER = 10  # of the largest error, which is that of a single row


@pytest.mark.parametrize("part", [4, *also("draws", *(k for k in range(PARTS) if k != 4))])
def test_generated_quantization(part: int) -> None:
    check_each(itertools.islice(quantized(CASES, SEED), part, None, PARTS), check)


# The scales of rows and weights are multiplied with each other before the sums are.
CASE = Case(D=32, L=32, N=24, V=16, steps=1, dtype="float32", forms="absorbed")
FOUND = Quantized(CASE, product="int_mm", early=False, layers=("kv_b",))


# Keys and values are a sum, of which one summand has rows that nothing rounds.
BESIDE = Quantized(replace(CASE, seed=2, beside="rows"), product="int_mm", early=False)


@pytest.mark.parametrize("how", [FOUND, BESIDE], ids=["scales", "beside"])
def test_cases_that_longer_runs_found(how: Quantized) -> None:
    check(how)


def check(how: Quantized) -> None:
    """Absorbed with no more error than the original has; with ``quantized="exact"`` rounded rows stay rounded."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)  # nothing absorbed: right where rows have to stay rounded
        found = _run(how, "absorb")
        # An index is no linear map to the analysis: columns that were moved are what is cached, or end the walk.
        assert found.verdicts == {"absorbed"} or how.order == "rows", found.reasons
        eps = torch.finfo(getattr(torch, how.case.dtype)).eps
        assert found.error.within(found.own, eps), f"error {found.error}, the original's {found.own}"
        if how.rounds_rows and how.case.seed < 4:  # of some: it takes as long again
            left = _run(how, "exact")
            # A summand of other rows, which are not rounded, may be absorbed alone.
            apart = how.case.beside in ("rows", "gated") and "absorbed" in left.verdicts
            if apart or how.product == "fake":  # rounded rows in their own precision are rows like any others
                assert left.error.within(left.own, eps), f"{left}"
                kept = how.case.dtype != "float32" or left.moved.median <= left.own.median / 4
                assert kept, f"{left}: rows lost their rounding"
            else:
                assert "absorbed" not in left.verdicts, left.reasons
                assert left.moved.largest == 0, f"{left}: nothing was to be changed"


@dataclass(frozen=True)
class Errors:
    """Of the rows of all calls: the distance over the size of a row. One near-one-hot softmax can make the largest."""

    median: float
    largest: float

    def within(self, own: Errors, eps: float) -> bool:
        """Whether these are no larger than errors of the original's size can be."""
        slack = ULP * eps
        return self.median <= ALLOWED * own.median + slack and self.largest <= OUTLIER * own.largest + slack


@dataclass(frozen=True)
class Found:
    """Errors against float64, compiled and in eager mode, and of the one against the other."""

    error: Errors
    own: Errors
    moved: Errors
    verdicts: set[str]
    reasons: list[str]


def _run(how: Quantized, mode: Literal["absorb", "exact"]) -> Found:
    module = QuantizedMLA(how)
    plain, exact = copy.deepcopy(module), copy.deepcopy(module).exactly()
    options = replace(options_of(how.case), quantized=mode, dequantize=how.dequantize)
    results: list[tuple[Tensor, ...]] = []
    verdicts, reasons = set(), []
    for _, got, eager, truth, report in side_by_side(module, plain, exact, options):
        assert got[0].dtype == eager[0].dtype
        results.append((got[0].double(), eager[0].double(), truth[0]))
        sites = () if report is None else report.sites
        verdicts |= {s.verdict for s in sites}
        reasons += [f"{s.code}: {s.reason} ({s.blame})" for s in sites]
    got, eager, truth = (torch.cat([r[k].flatten(0, 1) for r in results]) for k in range(3))
    both = ~(eager.isnan() | truth.isnan()).any(-1)  # rows without a visible key are NaN
    assert both.any()
    assert got[both].isfinite().all(), "a number that is none"
    size = truth[both].norm(dim=-1)
    error, own, moved = (
        Errors(float(distance.median()), float(distance.max()))
        for distance in ((a - b)[both].norm(dim=-1) / size for a, b in ((got, truth), (eager, truth), (got, eager)))
    )
    return Found(error, own, moved, verdicts, reasons)
