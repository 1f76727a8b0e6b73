"""Compiled calls in the place of Dynamo: the first whose guards hold runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_compile.core import collector
from mla_compile.core.tracing import one_at_a_time
from mla_compile.errors import ModelFileError


class Entry:
    """A compiled call.

    Attributes:
        run: called with the entry's arguments where the guards hold.
        hits: how often it ran.
    """

    def __init__(self, make: Callable[[], object], run: Callable[..., Any]) -> None:
        self._make, self.run, self.hits = make, run, 0
        self._guards: Any = None

    @property
    def guards(self) -> Any:
        """torch's: ``check`` of arguments by their names, and ``check_verbose``, which says what does not hold.

        Made when they are first asked for, as those of deep models take a second. Raises :class:`ModelFileError` where
        the model is not as it was then.
        """
        if self._guards is None:
            with one_at_a_time(), collector.paused():
                if self._guards is None:
                    self._guards = self._make()
        return self._guards


class Entries:
    """What takes the place of Dynamo in an optimized module."""

    def __init__(self, entries: Sequence[Entry], where: str) -> None:
        self.entries = list(entries)
        self.where = where

    def __call__(
        self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], forward: Any
    ) -> object:
        """The module's forward. Raises :class:`ModelFileError` for a call like none that was saved."""
        given = {"module": module, "args": args, "kwargs": kwargs, "forward": forward}
        for entry in self.entries:
            if entry.guards.check(given):
                if entry is not self.entries[0]:  # which is asked first in the next call, as Dynamo does
                    self.entries = [entry, *(other for other in self.entries if other is not entry)]
                entry.hits += 1
                return entry.run(module, args, kwargs, forward)
        raise ModelFileError(self._why(given))

    def _why(self, given: dict[str, object]) -> str:
        reasons = dict.fromkeys(_first_failure(entry.guards, given) for entry in self.entries)
        return (
            f"{self.where} has no code for this call: {'; '.join(reasons)}. Save with calls like this one "
            "(save(..., run=...)), or call optimize(model), which compiles what comes"
        )


def _first_failure(guards: Any, given: dict[str, object]) -> str:
    """What does not hold, in Dynamo's words without its comments."""
    parts = [part.split("  #")[0].strip() for part in guards.check_verbose(given).verbose_code_parts]
    # All relations between sizes are one guard, which says all of them, and not which fails.
    failing = (part for part in parts if len(parts) == 1 or not _holds(part, given))
    return next(failing, parts[0] if parts else "a guard of Dynamo does not hold")


def _holds(relation: str, given: dict[str, object]) -> bool:
    """Whether a relation between sizes holds, or is not one that can be computed from the arguments alone."""
    try:
        return bool(eval(relation, {"L": given}))  # from a folder whose code runs anyway
    except Exception:  # noqa: BLE001  other guards are no expressions
        return True
