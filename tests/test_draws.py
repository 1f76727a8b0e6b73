"""Tests that draw many cases check all of them, and say at the end which ones are wrong."""

from __future__ import annotations

import itertools

import pytest

from tests.adversary.many import check_mutants
from tests.adversary.places import Refused
from tests.support.generator import check_each

pytestmark = pytest.mark.quick


def test_all_cases_that_fail_are_told_once() -> None:
    checked = []

    def check(case: int) -> None:
        checked.append(case)
        assert case != 2, "two is wrong"
        if case == 4:
            raise KeyError(case)

    with pytest.raises(AssertionError) as failed:
        check_each(iter([1, 2, 3, 2, 4, 5]), check)
    assert checked == [1, 2, 3, 2, 4, 5]
    first, *others = str(failed.value).splitlines()
    assert first == "2 of 6"
    assert [line for line in others if line[0].isdigit()] == ["2: AssertionError: two is wrong", "4: KeyError: 4"]
    check_each([1, 3], check)


def test_mutants_that_are_wrong_do_not_end_a_run() -> None:
    draws = itertools.count()

    def make() -> int:
        draw = next(draws)
        if draw % 2:
            raise Refused
        assert draw != 4, "four is wrong"
        return draw

    with pytest.raises(AssertionError, match="four is wrong"):
        check_mutants(4, 100, make)
    assert next(draws) == 7  # 0, 2, 4 and 6 are mutants
    assert check_mutants(2, 100, make) == [8, 10]
    with pytest.raises(AssertionError, match="2 of 3 mutants were made"):
        check_mutants(3, 4, make)
