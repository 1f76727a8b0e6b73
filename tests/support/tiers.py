"""Which tests run when. A test is of one of three tiers, by what it shows.

``quick``
    What needs neither a compiler nor another process: analyses, records, formulas, plans, messages. Rooms declare it
    (:data:`QUICK`), and a test that is too slow for the loop of an edit is marked ``thorough``.
default
    Everything that no other test shows, ``quick`` included. ``pytest`` runs it.
``full``
    What tests of the default tier show too, again in another setting. Each such test says which (:data:`SETTINGS`).

Combinations are sorted by themselves: of a test with several parameters, the default tier runs as many cases as show
each pair of values together, and the full tier the others. ``@pytest.mark.singly`` asks for each value once instead of
each pair, ``@pytest.mark.wholly`` for every case.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SETTINGS = {
    "family": "in another model, layer, style, dtype or number of ranks",
    "inductor": "compiled by Inductor instead of run as a graph",
    "combination": "with settings together that are otherwise shown one at a time, or in pairs",
    "draws": "with more random cases, longer runs or more interleavings",
    "command": "as a program of the repository, run from its command line to its end",
}
"""What the full tier repeats tests of the default tier with."""

QUICK = ("core", "passes", "report", "runtime", "workbench")
"""Rooms of tests/ whose tests are quick, but for those marked ``full`` or ``thorough``."""


def full(setting: str) -> pytest.MarkDecorator:
    """A test, or a set of parameters, of the full tier."""
    if setting not in SETTINGS:
        raise ValueError(f"{setting!r} is no setting of the full tier; there are {', '.join(SETTINGS)}")
    return pytest.mark.full(setting)


def also(setting: str, *values: Any) -> list[Any]:
    """Values of a parameter that only the full tier tries; a tuple is the values of several parameters."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=full(setting)) for v in values]


def sort(items: Sequence[pytest.Item], rooms: Sequence[str]) -> None:
    """Mark what is of the full tier for its combination of parameters, and what is quick; ``rooms`` are the items'."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(item.iter_markers("full")):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        for item in _spare(sorted(several, key=lambda item: item.nodeid)):  # in whatever order tests run
            item.add_marker(full("combination"))
    for item, room in zip(items, rooms, strict=True):
        if room in QUICK and not any(item.iter_markers("full")) and not any(item.iter_markers("thorough")):
            item.add_marker("quick")


def _spare(cases: list[pytest.Item]) -> Iterable[pytest.Item]:
    """The cases of one test that show no value, or no pair of values, that the others do not show."""
    if len(cases) == 1 or any(cases[0].iter_markers("wholly")):
        return []
    together = 1 if any(cases[0].iter_markers("singly")) else 2
    shown = {item: _shown(item, together) for item in cases}
    left, spare = set().union(*shown.values()), dict.fromkeys(cases)
    while left:  # greedily: the case that shows most
        best = max(spare, key=lambda item: len(shown[item] & left))
        left -= shown[best]
        del spare[best]
    return spare


def _shown(item: Any, together: int) -> set[frozenset[tuple[str, int]]]:
    """Its values, single and by twos. Cases share the objects of what they are parametrized with."""
    axes = [(name, id(value)) for name, value in item.callspec.params.items()]
    return {frozenset(some) for n in range(1, together + 1) for some in itertools.combinations(axes, n)}


def in_share(nodeid: str, share: str) -> bool:
    """Whether a test is in the share ``K/N``: N shares are all tests, each once, by a hash of their names."""
    part, _, parts = share.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"a share is K/N with 1 <= K <= N, got {share!r}")
    return zlib.crc32(nodeid.encode()) % int(parts) == int(part) - 1
