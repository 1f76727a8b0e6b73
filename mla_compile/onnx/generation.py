"""Generate tokens for a batch of prompts. Each step adds a token to every row that has not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mla_compile.onnx.prompts import check_lengths, check_prompts, eos_ids
from mla_compile.onnx.sampling import Sampler, Sampling
from mla_compile.onnx.session import Session
from mla_compile.onnx.state import State

GREEDY = Sampling()


class Generation(Iterator[list[int | None]]):
    """An iterator that generates a batch. Each step yields a list: every row's new token, or ``None`` for an ended row.

    The token that ends a row is included. Nothing runs before the first step. :func:`generate` describes the arguments.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int] | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
    ) -> None:
        check_prompts(session.manifest, prompts)
        rows = len(prompts)
        limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * rows
        check_lengths(session.manifest, prompts, limits)
        self._session, self._prompts, self._left = session, prompts, limits
        self._eos = eos_ids(session.manifest, eos_token_ids)
        self._sampler = Sampler(sampling, rows)
        self._state: State | None = None
        self._last = np.full(rows, session.manifest.pad_token_id, np.int64)

    def end(self, row: int) -> None:
        """Stop a row."""
        self._left[row] = 0

    def ended(self, row: int) -> bool:
        """Whether a row yields no more tokens."""
        return self._left[row] == 0

    def __next__(self) -> list[int | None]:
        if not any(self._left):
            self._state = None  # frees the caches now, not only when the iterator is dropped
            raise StopIteration
        if self._state is None:
            longest = max(len(prompt) for prompt in self._prompts)
            self._state, logits_BV = self._session.prefill(self._prompts, capacity=longest + max(self._left) - 1)
        else:
            self._state.ended[:] = [not left for left in self._left]
            logits_BV = self._session.step(self._state, self._last)
        tokens: list[int | None] = [None] * len(self._left)
        for row, left in enumerate(self._left):
            # An ended row reads padding while other rows continue.
            self._last[row] = self._session.manifest.pad_token_id
            if left:
                token = self._sampler.choose(logits_BV[row], row)
                tokens[row] = self._last[row] = token
                self._left[row] = 0 if token in self._eos else left - 1
        return tokens


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_token_ids: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stream: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, including the token that ended the row.

    Args:
        session: a loaded model directory.
        prompts: token ids; prompts of different lengths are padded on the left.
        max_new_tokens: one limit for all rows, or a limit per row.
        eos_token_ids: tokens that end a row. The default is the model's own. With an empty list, no token ends a row.
        sampling: one setting for all rows, or a setting per row. The default is greedy.
        stream: called with the row and the token as soon as a token is chosen.

    Raises :class:`InputError` or :class:`OptionError` before anything runs, :class:`ModelFileError` if the model fails.
    """
    steps = Generation(session, prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, sampling=sampling)
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token is not None:
                rows[row].append(token)
                if stream is not None:
                    stream(row, token)
    return rows
