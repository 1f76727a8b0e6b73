"""How ranks share the rows of a cache: which rank holds which token, and at which position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sharing:
    """How ``size`` ranks share a cache's rows, round robin: rank ``t % size`` has token t in row ``t // size``.

    All ranks hold equally many rows, because collectives and compiled code need equal shapes on all ranks. The last row
    of a rank may thus belong to no token yet.

    Attributes:
        group: name of the process group for functional collectives.
        ranks: the global rank numbers, in the order of the group.
        rank: the position of this rank in ``ranks``.
        heads: whether ranks compute different heads, so that they have to exchange queries. ``True`` is always correct,
            but does more work than needed if all ranks compute the same heads.
    """

    group: str
    ranks: tuple[int, ...]
    rank: int
    heads: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def capacity(self, tokens: Any) -> Any:
        """Return how many rows each rank holds if there are ``tokens`` tokens (a number, possibly symbolic)."""
        return (tokens + self.size - 1) // self.size

    def owned(self, tokens: Any) -> Any:
        """Return how many of ``tokens`` tokens this rank holds."""
        return (tokens + self.size - 1 - self.rank) // self.size

    def all_rows(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the rows of all ranks, and return the first ``tokens`` rows [tokens,...].

        This is a collective: every rank has to call it, with equally many rows.
        """
        c10d = torch.ops._c10d_functional
        sent = c10d.all_gather_into_tensor(own.contiguous(), self.size, self.group)
        parts = c10d.wait_tensor(sent)
        rows: torch.Tensor = parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(0, 1)[:tokens]
        return rows
