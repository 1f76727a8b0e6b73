"""Mutants of attentions whose heads share rows: never a wrong number, and every reason that is given is true.

``MLA_ADVERSARY_ROWS`` sets how many mutants are made (24 by default), ``MLA_ADVERSARY_SEED`` draws others.
"""

from __future__ import annotations

import os
import random

import pytest

from mla_compile.codes import Code
from tests.adversary.many import check_mutants
from tests.adversary.mutations import MUTATIONS
from tests.adversary.places import Edit, apply, edges
from tests.adversary.shared import STEPS, base_of, checked, mutant, pool
from tests.support.generated_rows import RowsCase
from tests.support.tiers import also

COUNT = int(os.environ.get("MLA_ADVERSARY_ROWS", "24"))
SEED = int(os.environ.get("MLA_ADVERSARY_SEED", "0"))
BASES = max(6, COUNT // 10)
TRIES = 20

pytestmark = pytest.mark.usefixtures("native_kernel")


@pytest.mark.parametrize("count", [COUNT // 2, *also("draws", COUNT)])
def test_mutants(count: int) -> None:
    rng = random.Random(SEED)
    bases = pool(BASES, 1000 * SEED)
    reports = check_mutants(count, TRIES * count, lambda: mutant(rng.choice(bases), MUTATIONS[rng.choice(STEPS)], rng))
    codes = {site.code for report in reports for site in report.sites}
    assert Code.SHARED_ROWS in codes
    assert len(codes) > 1


def test_keys_whose_batch_is_the_columns_of_the_values() -> None:
    """What a longer run found: where these are as many, axes of one tensor are not told apart by their sizes."""
    base = base_of(RowsCase(B=4, T=4, W=4, values="first", spelling="expand"))
    assert base is not None
    (edge,) = [e for e in edges(base, "keys") if e.node.op == "placeholder"]  # type: ignore[arg-type]
    report = checked(base, apply(base, edge, Edit(lambda x: x.transpose(0, 3))))  # type: ignore[arg-type]
    assert report.sites[0].code is not Code.SHARED_ROWS


def test_bases_have_all_forms() -> None:
    cases = [base.case for base in pool(BASES, 1000 * SEED)]
    assert {case.C > 0 for case in cases} == {True, False}
    assert {case.sinks != "none" for case in cases} == {True, False}
    assert {case.listed != "none" for case in cases} == {True, False}
