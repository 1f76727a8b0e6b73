"""Generated attentions with an indexer: the numbers of the original, and rows of the listed keys where that is legal.

``MLA_PROPERTY_SPARSE`` sets how many cases are drawn (8 by default) and ``MLA_PROPERTY_SEED`` draws others.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_compile.errors import MlaCompileWarning
from mla_compile.report.report import Report, SiteReport
from tests.support.generated_run import options_of, side_by_side
from tests.support.generated_sparse import EVERY_KEY, SparseCase, SparseMLA, keep_or_list, sparse_cases
from tests.support.generator import Case, check_each
from tests.support.tiers import also
from tests.test_property import compare, narrow

CASES = int(os.environ.get("MLA_PROPERTY_SPARSE", "8"))
SEED = int(os.environ.get("MLA_PROPERTY_SEED", "0"))
PARTS = 8


# A mask over a longer buffer, which the model cuts to the tokens that there are: a length and a list.
CUT = SparseCase(
    Case(D=8, H=5, L=3, N=5, R=0, V=8, scale="query", mask="add", rope="none", cache="index_copy", cut=True,
         forms="absorbed", dtype="float64"),
    k=EVERY_KEY, indexer=3, form="numbers", seen="inside", beside="mul",
)  # fmt: skip


def test_a_list_over_a_longer_buffer_may_name_keys_that_are_cut_off() -> None:
    (site,) = run(CUT, SparseMLA(CUT)).sites
    assert site.chosen == 8


def test_what_is_left_of_a_longer_mask_is_cut() -> None:
    (site,) = run(replace(CUT, beside="and"), SparseTwice(replace(CUT, beside="and"))).sites
    assert any("left as a mask of keys" in note for note in site.notes)


class SparseTwice(SparseMLA):
    """Two lists, of which one stays a mask."""

    def _boolean(self, index: Tensor, flags: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return super()._boolean(index, flags, shape) & super()._boolean(index.flip(-1)[..., :4], flags, shape)


@pytest.mark.parametrize("part", [0, *also("draws", *range(1, PARTS))])
def test_generated_sparse_attention(part: int) -> None:
    check_each(sparse_cases(max(1, CASES // PARTS), SEED * PARTS + part), check)


def check(sparse: SparseCase) -> None:
    """Raises AssertionError on a wrong number, and where a list that can be read stays a mask."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        report = run(sparse, SparseMLA(sparse))
    check_lists(sparse, report)


def run(sparse: SparseCase, module: SparseMLA) -> Report:
    """The report on the last step, after all results were compared."""
    case = sparse.case
    plain, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    last: Report | None = None
    calls = side_by_side(module, plain, exact, options_of(case), keep_or_list(sparse))
    for done, *results, report in calls:
        last = report
        for k, values in enumerate(zip(*results, strict=True)):
            compare(case, f"result {k} after {done} tokens", *values)
    assert last is not None, "the last decode step was not compiled"
    return last


def check_lists(sparse: SparseCase, report: Report) -> None:
    sites = report.sites[-sparse.layers :]
    said = [f"{site.verdict} ({site.code}) {site.chosen}: {site.reason} {site.notes}" for site in sites]
    absorbed = [site for site in sites if site.verdict == "absorbed"]
    case = sparse.case
    # Two caches of the same length, each with a symbol of its own, are not known to be equal before a guard says so.
    two_lengths = case.door == "symbolic" and not sparse.given
    if case.forms == "absorbed" and narrow(case) and not two_lengths:
        assert len(absorbed) == sparse.layers, said
    assert all(site.chosen is not None for site in absorbed if must_list(sparse, site)), said
    if sparse.case.mask == "visible_fill":
        assert all(site.chosen is None for site in absorbed), said


def must_list(sparse: SparseCase, site: SiteReport) -> bool:
    """Whether the list has to be read: where the whole attention is one operator, and its heads have axes of their own.

    A number that is no infinity hides by a proof of its own (tests/passes/attention/test_chosen.py).
    """
    one_by_one = any("one by one" in note for note in site.notes)
    one_block = 1 < sparse.block >= sparse.case.T + sparse.case.steps
    return not (one_by_one or one_block or sparse.finite or sparse.case.chunk > 1 or sparse.case.core == "bmm")
