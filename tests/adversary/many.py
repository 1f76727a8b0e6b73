"""Many mutants of one kind; those that are wrong are told at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from tests.adversary.places import Refused
from tests.support.generator import check_each

M = TypeVar("M")


def check_mutants(wanted: int, tries: int, make: Callable[[], M]) -> list[M]:
    """What ``make`` returned for ``wanted`` mutants; it makes and checks one in each call, of at most ``tries``.

    It raises :class:`Refused` where the step does not fit. Raises AssertionError with all that are wrong.
    """
    made: list[M | None] = []

    def one(_: int) -> None:
        made.append(None)  # a mutant that is wrong counts, too
        try:
            made[-1] = make()
        except Refused:
            made.pop()

    check_each(itertools.takewhile(lambda _: len(made) < wanted, range(tries)), one)
    assert len(made) == wanted, f"{len(made)} of {wanted} mutants were made"
    return [m for m in made if m is not None]
