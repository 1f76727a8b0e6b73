"""What variants of a function are compiled for, and whether there will be an end to them."""

from __future__ import annotations

from mla_compile.dynamo.causes import drained, failed

PHASES = 4
"""For how many values of one thing code is compiled before it counts as one that changes in every call.

A tensor that fills and drains is empty, has one row, is full, and anything between. Several together take several times
as many graphs as Dynamo's limit, all of them in the first tokens."""


class Phases:
    """The guards that made Dynamo compile one function again, and the values that it had been compiled for."""

    def __init__(self) -> None:
        self.drains = False
        self._values: dict[str, set[str]] = {}

    def add(self, reason: str) -> None:
        """Notes a failed guard, as Dynamo logs it."""
        what, compiled_for = failed(reason)
        self._values.setdefault(what, set()).add(compiled_for)
        self.drains |= drained(reason)

    def room(self, limit: int) -> int:
        """How many variants there may be where the user allows ``limit``: more of what fills and drains alone."""
        settles = self.drains and all(len(values) <= PHASES for values in self._values.values())
        return limit * PHASES if settles else limit
