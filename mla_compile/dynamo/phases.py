"""Judges, from failed guards, whether the number of a function's compiled variants will stop growing."""

from __future__ import annotations

from mla_compile.dynamo.causes import drained, failed

PHASES = 4
"""A guard that failed for more values than this is assumed to fail in every call.

A tensor that fills and drains has four kinds of length: empty, one row, full, and any length between. Several of these
tensors together need several times as many graphs as Dynamo's limit allows, all within the first tokens.
"""


class Phases:
    """The guards that made Dynamo recompile one function, and the values that the function had been compiled for."""

    def __init__(self) -> None:
        self.drains = False
        self._values: dict[str, set[str]] = {}

    def add(self, reason: str) -> None:
        """Record a failed guard, in the form in which Dynamo logs it."""
        what, compiled_for = failed(reason)
        self._values.setdefault(what, set()).add(compiled_for)
        self.drains |= drained(reason)

    def room(self, limit: int) -> int:
        """Return how many variants to allow if the user's limit is ``limit``: more for buffers that fill and drain."""
        settles = self.drains and all(len(values) <= PHASES for values in self._values.values())
        return limit * PHASES if settles else limit
