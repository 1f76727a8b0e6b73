"""The tiers of the tests: what is left out by default is what other tests show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tiers

SIZES = {"a": [object() for _ in range(4)], "b": [object() for _ in range(3)], "c": [object() for _ in range(3)]}


class Item:
    """What :func:`tiers.sort` asks of a case of a test."""

    def __init__(self, name: str, params: dict[str, Any], *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.callspec, self.marks = name, SimpleNamespace(params=params), list(marks)

    def iter_markers(self, name: str) -> Iterator[pytest.MarkDecorator]:
        return (mark for mark in self.marks if mark.name == name)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(getattr(pytest.mark, mark) if isinstance(mark, str) else mark)

    @property
    def tier(self) -> str:
        return next((name for name in ("full", "quick") if any(self.iter_markers(name))), "default")


def product(*marks: pytest.MarkDecorator) -> list[Item]:
    """All combinations of :data:`SIZES`, as the cases of a test."""
    rows = itertools.product(*SIZES.values())
    return [Item(f"test_it[{i}]", dict(zip(SIZES, row, strict=True)), *marks) for i, row in enumerate(rows)]


def sorted_into_tiers(items: list[Item], room: str = "doors") -> list[Item]:
    tiers.sort(items, [room] * len(items))  # type: ignore[arg-type]  # it asks for no more
    return [item for item in items if item.tier != "full"]


def test_every_pair_of_values_is_shown_by_default():
    left = sorted_into_tiers(product())
    assert 4 * 3 <= len(left) < 20
    for one, other in itertools.combinations(SIZES, 2):
        pairs = {(item.callspec.params[one], item.callspec.params[other]) for item in left}
        assert len(pairs) == len(SIZES[one]) * len(SIZES[other])


@pytest.mark.parametrize(("mark", "count"), [("singly", 4), ("wholly", 36)])
def test_a_mark_asks_for_each_value_or_for_every_case(mark, count):
    left = sorted_into_tiers(product(getattr(pytest.mark, mark)))
    assert len(left) == count
    assert all({item.callspec.params[name] for item in left} == set(values) for name, values in SIZES.items())


def test_what_the_full_tier_shows_is_shown_by_no_case_of_it():
    """A value whose only cases are marked does not bring them back, and the others are chosen without them."""
    items = product()
    marked = [item for item in items if item.callspec.params["a"] is SIZES["a"][0]]
    for item in marked:
        item.add_marker(tiers.full("family"))
    left = sorted_into_tiers(items)
    assert not set(marked) & set(left)
    assert {item.callspec.params["b"] for item in left} == set(SIZES["b"])


def test_one_parameter_is_no_combination():
    items = [Item(f"test_it[{i}]", {"a": value}) for i, value in enumerate(SIZES["a"])]
    assert sorted_into_tiers(items) == items


@pytest.mark.parametrize(
    ("room", "marks", "tier"),
    [
        ("passes", (), "quick"),
        ("passes", (pytest.mark.thorough,), "default"),
        ("passes", (tiers.full("draws"),), "full"),
        ("doors", (), "default"),
    ],
)
def test_rooms_are_quick_but_for_what_is_marked(room, marks, tier):
    item = Item("test_it", {}, *marks)
    sorted_into_tiers([item], room)
    assert item.tier == tier


def test_shares_are_all_tests_each_once():
    names = [f"tests/test_it.py::test[{i}]" for i in range(500)]
    shares = [[name for name in names if tiers.in_share(name, f"{part}/10")] for part in range(1, 11)]
    assert sorted(itertools.chain(*shares)) == sorted(names)
    assert all(20 < len(share) < 90 for share in shares)


@pytest.mark.parametrize("share", ["0/3", "4/3", "1", "a/b", "1/-2"])
def test_a_share_is_a_part_of_a_number(share):
    with pytest.raises(pytest.UsageError, match="a share is K/N"):
        tiers.in_share("a test", share)


def test_a_setting_is_one_that_is_explained():
    with pytest.raises(ValueError, match="there are family, inductor"):
        tiers.full("slow")
