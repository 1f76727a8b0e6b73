"""A scheduler of transformers that accepts only valid requests, so that no request can end other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState

from mla_compile.batching.sampling import check_drawn
from mla_compile.core.counting import count
from mla_compile.errors import InputError


def latent_scheduler(kind: type[Any]) -> type[Any]:
    """Return a subclass of ``kind`` that refuses invalid requests. The sender gets the error as the result."""

    class Latent(kind):
        vocabulary = 0
        gone: Callable[[RequestState], None] = staticmethod(lambda _: None)
        """Called with each request that was cancelled."""

        def add_waiting_request(self, state: RequestState) -> None:
            if state._true_initial_tokens or state.is_cpu_offloaded:  # the request was put back into the queue
                count("num_preemptions")
            else:
                self._check(state)
                count("prompt_tokens", len(state.initial_tokens))
            super().add_waiting_request(state)

        def clear_cancelled_requests(self) -> list[RequestState]:
            cancelled: list[RequestState] = super().clear_cancelled_requests()
            for state in cancelled:
                self.gone(state)
                count("request_success", finished_reason="abort")
            return cancelled

        def _check(self, state: RequestState) -> None:
            ids, new = state.initial_tokens, state.max_new_tokens
            if not ids:
                raise InputError("the prompt is empty; expected at least one token id")
            if new is not None and (isinstance(new, bool) or not isinstance(new, int) or new < 1):
                raise InputError(f"max_new_tokens is {new!r}, expected a number from 1 on")
            told = self.cache.never_fits(state)
            if told is not None:
                raise InputError(told)
            wrong = next((n for n in ids if not isinstance(n, int) or not 0 <= n < self.vocabulary), None)
            if wrong is not None:
                raise InputError(f"the prompt holds {wrong!r}, expected token ids below {self.vocabulary}")
            given = state.logit_processor_kwargs
            check_drawn(**{name: given[name] for name in ("temperature", "top_k", "top_p") if name in given})

    return Latent
