"""Runs compiled calls in place of Dynamo. The first saved call whose guards hold is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._dynamo.guards import GuardManagerWrapper

from mla_compile.core import collector
from mla_compile.core.tracing import one_at_a_time
from mla_compile.errors import ModelFileError


class Entry:
    """A compiled call.

    Attributes:
        run: the compiled code, which is called if the guards hold.
        hits: how often the code has run.
    """

    def __init__(self, make: Callable[[], GuardManagerWrapper], run: Callable[..., object]) -> None:
        self._make, self.run, self.hits = make, run, 0
        self._guards: GuardManagerWrapper | None = None

    @property
    def guards(self) -> GuardManagerWrapper:
        """The guards of the call. ``check`` tells whether the guards hold for a dict of arguments.

        ``check_verbose`` also says which guard fails. The guards are built on first use, because building takes a
        second for a deep model. Raises :class:`ModelFileError` if the model has changed since the code was saved.
        """
        if self._guards is None:
            with one_at_a_time(), collector.paused():
                if self._guards is None:
                    self._guards = self._make()
        return self._guards


class Entries:
    """Runs saved calls where an optimized module would otherwise call Dynamo."""

    def __init__(self, entries: Sequence[Entry], where: str) -> None:
        self.entries = list(entries)
        self.where = where

    def __call__(
        self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], forward: object
    ) -> object:
        """Run the module's forward. Raises :class:`ModelFileError` if no saved call fits the arguments."""
        given = {"module": module, "args": args, "kwargs": kwargs, "forward": forward}
        for entry in self.entries:
            if entry.guards.check(given):
                if entry is not self.entries[0]:  # like Dynamo, try the latest match first in the next call
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


def _first_failure(guards: GuardManagerWrapper, given: dict[str, object]) -> str:
    """Return Dynamo's text of the first guard that fails, without comments."""
    parts = [part.split("  #")[0].strip() for part in guards.check_verbose(given).verbose_code_parts]
    # All relations between sizes form one guard. The message lists all relations, but not which relation fails.
    failing = (part for part in parts if len(parts) == 1 or not _holds(part, given))
    return next(failing, parts[0] if parts else "a guard of Dynamo does not hold")


def _holds(relation: str, given: dict[str, object]) -> bool:
    """Whether a relation between sizes holds, or cannot be evaluated from the arguments alone."""
    try:
        return bool(eval(relation, {"L": given}))  # the folder is trusted: its code runs anyway
    except Exception:  # noqa: BLE001  some guards are not expressions
        return True
