"""Track which requests are unanswered, and deliver their answers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from mla_compile.core.counting import count
from mla_compile.errors import InputError

logger = logging.getLogger("mla_compile")


class Router(OutputRouter):
    """Answers each request once, under an id that no other unanswered request has.

    The scheduler of transformers identifies requests by ids. If two requests had the same id, the second request would
    write to the pages of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: set[str] = set()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def take(self, wanted: str, copies: int) -> str:
        """Reserve an id for a request with ``copies`` answers: ``wanted``, or a derived id if ``wanted`` is in use.

        Raises :class:`InputError` if the id is not a string.
        """
        if not isinstance(wanted, str):
            raise InputError(f"the id of a request is {wanted!r}, expected a string")
        with self._lock:
            name = wanted
            while not self._live.isdisjoint(_family(name, copies)):
                name = f"{wanted}__again#{next(self._numbers)}"
            self._live.update(_family(name, copies))
        if name != wanted:
            logger.warning("a request with the id %s is under way; the new request gets the id %s", wanted, name)
        return name

    def is_free(self, names: Iterable[str]) -> bool:
        """Whether no unanswered request has any of these ids."""
        with self._lock:
            return self._live.isdisjoint(names)

    def give_up(self, name: str, copies: int = 1) -> None:
        """Forget a request that will not be answered, and its result handler."""
        with self._lock:
            self._live.difference_update(_family(name, copies))
            self.result_handlers.pop(name, None)

    def register(self, name: str) -> None:
        """Raise :class:`InputError` if a result handler for this id exists already."""
        with self._lock:
            if name in self.result_handlers:
                raise InputError(f"a request with the id {name!r} is under way; expected one that is not in use")

    def deliver(self, output: GenerationOutput) -> None:
        """Deliver as transformers does, and release the id of a finished request."""
        self._note((output,))
        super().deliver(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Like :meth:`deliver`, for several outputs."""
        self._note(outputs)
        super().deliver_batch(outputs)

    def _note(self, outputs: Iterable[GenerationOutput]) -> None:
        done = [output for output in outputs if output.is_finished()]
        with self._lock:
            self._live.difference_update(output.request_id for output in done)
        for output in done:
            if output.error is not None:
                count("request_success", finished_reason="error")


def _family(name: str, copies: int) -> set[str]:
    """Return the ids of a request and of the request's copies in transformers."""
    return {name, *(f"{name}__child#{k}" for k in range(copies - 1))}
