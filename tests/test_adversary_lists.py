"""Masks that look as if they said "the keys of a list and no others", and say something else.

Each is a generated sparse attention of which one thing was changed. Whatever is made of it has to give its numbers, and
where the change makes another mask of it, no list may be read. ``MLA_ADVERSARY_LISTS`` sets how many are drawn (8 by
default), ``MLA_ADVERSARY_SEED`` draws others.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mla_compile.errors import MlaCompileWarning
from tests.support.generated_sparse import ADDED, BOOLEANS, SparseCase, SparseMLA, sparse_cases
from tests.support.generator import Case, check_each
from tests.support.tiers import also
from tests.test_property_sparse import run

CASES = int(os.environ.get("MLA_ADVERSARY_LISTS", "8"))
SEED = int(os.environ.get("MLA_ADVERSARY_SEED", "0"))


def first_too(mask: Tensor) -> Tensor:
    """The first key is seen by all."""
    return mask | (torch.arange(mask.shape[-1]) == 0)


def one_count_is_not_enough(mask: Tensor) -> Tensor:
    """Of counts of two things, both have to be there."""
    return (mask.int() + (torch.arange(mask.shape[-1]) % 2)) > 1


def wrapped(mask: Tensor) -> Tensor:
    """A count that comes round to 0."""
    return (mask.to(torch.uint8) * 255 + 1).bool()


BOOLEAN_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all but the list": lambda m: ~m,
    "where, the wrong way round": lambda m: torch.where(m, False, True),
    "the first too": first_too,
    "or the others": lambda m: m | (torch.arange(m.shape[-1]) % 2 == 0),
    "one or the other": lambda m: m ^ (torch.arange(m.shape[-1]) % 2 == 0),
    "moved along the keys": lambda m: m.roll(1, -1),
    "from the last key": lambda m: m.flip(-1),
    "of the query before": lambda m: m.roll(1, -2),
    "of another of the batch": lambda m: m.flip(0),
    "two of two": one_count_is_not_enough,
    "wrapped": wrapped,
    "as a number that is not 0": lambda m: (m.float() - 1).bool(),
    "at most": lambda m: m.float() <= 0.5,
    "of any query": lambda m: m.any(-2, keepdim=True).expand(m.shape),
    "up to the last listed": lambda m: m.flip(-1).cumsum(-1).flip(-1) > 0,
    "beside a neighbour": lambda m: m | m.roll(1, -1),
}
ADDED_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "soft": lambda m: m.clamp(min=-5.0),
    "softer by a factor": lambda m: m.clamp(min=-1e4) * 1e-3,
    "a number that a score shows beside": lambda m: m.clamp(min=-50.0),
    "the wrong sign": lambda m: torch.where(m == 0, -math.inf, 0.0).to(m.dtype),
    "a bonus": lambda m: m + 0.5 * (torch.arange(m.shape[-1]) % 2),
    "moved along the keys": lambda m: m.roll(1, -1),
    "of the query before": lambda m: m.roll(1, -2),
    "nothing is hidden": lambda m: m.nan_to_num(neginf=0.0),
}
SAME = ("of another of the batch", "of the query before")
"""What may change nothing: of one query, or one list for all of a batch."""


@dataclass(frozen=True)
class Mutant:
    """A generated case, and what was changed of its mask."""

    sparse: SparseCase
    fault: str


class MutantMLA(SparseMLA):
    """Its mask is another than its list says."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.sparse)
        self.fault = mutant.fault

    def _boolean(self, index: Tensor, flags: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return BOOLEAN_FAULTS[self.fault](super()._boolean(index, flags, shape))

    def _added(self, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        return ADDED_FAULTS[self.fault](super()._added(index, shape))


def mutants(count: int, start: int) -> list[Mutant]:
    """The same for each ``start``; each fault comes once before one comes twice."""
    rng = random.Random(start)
    bags: dict[bool, list[str]] = {True: [], False: []}

    def of(sparse: SparseCase) -> Mutant:
        added = sparse.form in ADDED
        faults: Sequence[str] = list(ADDED_FAULTS if added else BOOLEAN_FAULTS)
        bags[added] = bags[added] or rng.sample(faults, len(faults))
        # Of several layers a row without a key, which is NaN, is a hidden key of the next one.
        return Mutant(replace(sparse, layers=1), bags[added].pop())

    return [of(sparse) for sparse in sparse_cases(count, start)]


# Numbers that are added, at a place that no axis runs along.
FOUND = Mutant(
    SparseCase(
        Case(T=2, D=2, H=2, L=2, N=2, V=2, share="repeat", core="bmm", mask="add", cache="slice", cut=True,
             forms="absorbed", seed=9),
        indexer=0, given="list", form="scatter_inf", seen="inside", beside="fill",
    ),
    "a bonus",
)  # fmt: skip


def test_what_a_longer_run_found() -> None:
    check(FOUND)


@pytest.mark.parametrize("part", [0, *also("draws", 1, 2, 3)])
def test_masks_that_say_something_else(part: int) -> None:
    check_each(mutants(CASES, SEED)[part::4], check)


def check(mutant: Mutant) -> None:
    """Raises AssertionError on a wrong number, and where a list is read that is not what the mask says."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        report = run(mutant.sparse, MutantMLA(mutant))
    listed = [site for site in report.sites if site.verdict == "absorbed" and site.chosen is not None]
    assert mutant.fault in SAME or not listed, [(site.reason, site.notes) for site in listed]


def test_the_faults_are_of_all_forms() -> None:
    drawn = mutants(200, 3)
    assert {m.fault for m in drawn} == {*BOOLEAN_FAULTS, *ADDED_FAULTS}
    assert {m.sparse.form for m in drawn} == {*BOOLEANS, *ADDED}
