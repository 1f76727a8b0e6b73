"""Tables of spellings of which the default tier tries some, because other tests show what the rest would."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tests.support.tiers import also


def usual(every: Iterable[Any], kept: Collection[Any] = (), *, rare: Collection[Any] = ()) -> list[Any]:
    """The values ``kept`` for the default tier, or all but ``rare`` ones; then the others, for the full tier."""
    every = list(every)
    assert bool(kept) != bool(rare)
    assert all(value in every for value in (*kept, *rare)), "a value is not in the table any more"
    kept = kept or [value for value in every if value not in rare]
    return [*kept, *also("combination", *(value for value in every if value not in kept))]
