"""Generated attentions whose heads share rows: one operator with the numbers of the original, and what must stay stays.

``MLA_PROPERTY_ROWS`` sets how many cases are drawn of each kind (6 by default), ``MLA_PROPERTY_SEED`` draws others.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from mla_compile.codes import Code
from tests.support.generated_rows import RowsCase, SharedRows, in_half, inputs_of, rows_case
from tests.support.generator import check_each
from tests.support.programs import error, export, optimized, run

CASES = int(os.environ.get("MLA_PROPERTY_ROWS", "6"))
SEED = int(os.environ.get("MLA_PROPERTY_SEED", "0")) * 100_000

pytestmark = pytest.mark.usefixtures("native_kernel")


def done(case: RowsCase):
    module, exact = SharedRows(case).eval(), SharedRows(replace(case, float32=False)).eval()
    module, dtype = (in_half(module), torch.bfloat16) if case.half else (module, torch.float64)
    outcome = optimized(export(module, [x.to(dtype) for x in inputs_of(case)]), lowering="op", verify=True)
    # Larger scores are luck in half precision, and in float32 where nothing near them is taken off before the exponent.
    for scale in (1.0,) if case.half or (case.float32 and case.sinks == "in_exponent") else (1.0, 30.0):
        given = [x.to(dtype) for x in inputs_of(case, scale)]
        with torch.no_grad():
            own, (got,), want = module(*given), run(outcome.program, *given), exact(*(x.double() for x in given))
        assert got.dtype == own.dtype
        allowed = 2 * error(own.double(), want) + (0.02 if case.half else 1e-5 if case.float32 else 1e-11)
        assert error(got.double(), want) < allowed
    return outcome


def shared(case: RowsCase) -> None:
    outcome = done(case)
    (site,) = outcome.report.sites
    assert site.code is Code.SHARED_ROWS, (site.code, site.reason)
    assert outcome.fused == 1


def other(case: RowsCase) -> None:
    outcome = done(case)
    assert all(site.code is not Code.SHARED_ROWS for site in outcome.report.sites)
    assert outcome.fused == 0


def test_rows_that_heads_share():
    check_each((rows_case(SEED + n, legal=True) for n in range(CASES)), shared)


def test_the_rounding_of_a_softmax_in_float32_is_the_originals():
    """Of large scores, which the operator does not round."""
    shared(RowsCase(B=3, S=3, T=2, G=2, C=9, k=4, queries="given", sinks="before", float32=True, mask="causal",
                    indexer=True, seed=140_100_009))  # fmt: skip


def test_near_misses_stay():
    check_each((rows_case(SEED + n, legal=False) for n in range(CASES)), other)
