"""Tampering with memory of K and V, and with decode steps over pages: refused, or the numbers of the original.

``MLA_ADVERSARY_BUFFERS`` and ``MLA_ADVERSARY_PAGES`` are how many mutants are made of each, ``MLA_ADVERSARY_SEED``
draws others; those that change nothing must be absorbed:
``MLA_ADVERSARY_BUFFERS=500 MLA_ADVERSARY_PAGES=300 MLA_ADVERSARY_SEED=1 pytest tests/test_adversary_caches.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.adversary import buffers, steps_of_many
from tests.adversary.pages import check_pages
from tests.adversary.places import Refused
from tests.adversary.sessions import check_buffers
from tests.support.generated_own import own_cases
from tests.support.generator import check_each, drawn
from tests.support.tiers import also

SEED = int(os.environ.get("MLA_ADVERSARY_SEED", "0"))
BUFFERS = int(os.environ.get("MLA_ADVERSARY_BUFFERS", "3"))
PAGES = int(os.environ.get("MLA_ADVERSARY_PAGES", "3"))
M = TypeVar("M")
PARTS = pytest.mark.parametrize("part", [0, *also("draws", 1, 2, 3)])
"""The first mutant, which changes nothing and must be absorbed, is of the first part."""


@PARTS
def test_tampered_memory(part: int) -> None:
    made = buffers.mutants(drawn(BUFFERS, SEED, own_cases()), SEED)
    check_each(made[part::4], _if_it_runs(check_buffers))


@PARTS
def test_tampered_steps(part: int) -> None:
    check_each(steps_of_many.mutants(PAGES, SEED)[part::4], _if_it_runs(check_pages))


def _if_it_runs(check: Callable[[M], str]) -> Callable[[M], None]:
    def checked(mutant: M) -> None:
        try:
            check(mutant)
        except Refused:
            return  # many changes do not fit many layers

    return checked
