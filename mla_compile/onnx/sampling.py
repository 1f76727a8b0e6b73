"""Choose the next token from logits: take the most probable token, or draw from the most probable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mla_compile.core.sampling import check_sampling
from mla_compile.errors import InputError, ModelFileError

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How a row's tokens are chosen.

    Attributes:
        temperature: logits are divided by this number. If it is 0, the token with the largest logit is taken.
        top_k: draw only from the k most probable tokens. 0 draws from all tokens.
        top_p: draw only from the fewest tokens whose probabilities sum to at least p. Applied after ``top_k``.
        seed: the same seed gives the same tokens. ``None`` gives different tokens each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)


class Sampler:
    """Chooses tokens for the rows of a batch. Each row has its own settings and random numbers."""

    def __init__(self, sampling: Sampling | Sequence[Sampling], rows: int) -> None:
        """Take one setting for all rows, or a list with one setting per row.

        With one setting, rows draw different random numbers. With a list, a row's random numbers depend only on its own
        seed, not on its index in the batch.
        """
        if isinstance(sampling, Sampling):
            self._rows = tuple(
                (sampling, np.random.default_rng(None if sampling.seed is None else [sampling.seed, row]))
                for row in range(rows)
            )
            return
        if len(sampling) != rows or not all(isinstance(entry, Sampling) for entry in sampling):
            raise InputError(f"sampling has {len(sampling)} entries, expected one Sampling for each of {rows} rows")
        self._rows = tuple(
            (entry, np.random.default_rng(None if entry.seed is None else [entry.seed, 0])) for entry in sampling
        )

    def choose(self, logits: Logits, row: int) -> int:
        """Choose a token for a row from its logits, float32 [vocab]. A token with logit -inf is never chosen.

        Raises :class:`ModelFileError` if the largest logit is not finite, for example after an overflow in the model.
        """
        best = int(logits.argmax())  # argmax treats NaN as the largest number
        if not np.isfinite(logits[best]):
            raise ModelFileError(
                f"the model's logits for row {row} hold {logits[best]}, expected numbers: it overflowed its dtype, or "
                "its weights are damaged"
            )
        settings, random = self._rows[row]
        if settings.temperature == 0 or settings.top_k == 1:
            return best
        tokens = _most_probable(logits, settings.top_k)
        with np.errstate(over="ignore"):  # at a tiny temperature, all weights except the best become 0, as they should
            weights = np.exp((logits[tokens].astype(np.float64) - logits[best]) / settings.temperature)
        sums = weights.cumsum()
        # The token that crosses p is included, so at least one token is kept.
        kept = int(np.searchsorted(sums, settings.top_p * sums[-1])) + 1
        drawn = random.random() * sums[min(kept, len(sums)) - 1]
        return int(tokens[min(int(np.searchsorted(sums, drawn, side="right")), kept - 1, len(sums) - 1)])


def _most_probable(logits: Logits, top_k: int) -> npt.NDArray[np.int64]:
    """Return the ``top_k`` most probable token ids (0: all), by descending logit. Equal logits are sorted by id."""
    if 0 < top_k < len(logits):
        smallest = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        tokens = np.flatnonzero(logits >= smallest)  # more than k if several logits equal the k-th largest
        order = np.argsort(-logits[tokens], kind="stable")[:top_k]
        return tokens[order]
    return np.argsort(-logits, kind="stable")
