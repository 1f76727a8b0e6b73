"""How ranks share the rows of a cache: which rank has which token, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sharing:
    """The rows of a cache over ``size`` ranks, round robin: rank ``t % size`` has token t, as its row ``t // size``.

    All ranks hold as many rows, of which the last one may be nobody's yet: collectives need equal shapes, and every
    rank has to compile for the same ones.

    Attributes:
        group: name of the process group, as functional collectives take it.
        ranks: their numbers in the whole program, in the order of the group.
        rank: which of them this one is.
        heads: whether each rank computes other heads, so that queries have to be exchanged. Right in any case, and
            more work than needed where all compute the same.
    """

    group: str
    ranks: tuple[int, ...]
    rank: int
    heads: bool = False

    @property
    def size(self) -> int:
        """How many ranks share."""
        return len(self.ranks)

    def capacity(self, tokens: Any) -> Any:
        """Rows that each rank holds of so many tokens (a number, or a symbolic one)."""
        return (tokens + self.size - 1) // self.size

    def owned(self, tokens: Any) -> Any:
        """Rows of these that are this rank's tokens."""
        return (tokens + self.size - 1 - self.rank) // self.size

    def all_rows(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """The first ``tokens`` rows [tokens,...] of all ranks, which each give as many: their first rows.

        A collective: every rank that shares them has to call it.
        """
        c10d = torch.ops._c10d_functional
        sent = c10d.all_gather_into_tensor(own.contiguous(), self.size, self.group)
        parts = c10d.wait_tensor(sent)
        rows: torch.Tensor = parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(0, 1)[:tokens]
        return rows

    def same_ranks(self, other: Sharing) -> bool:
        """Whether rows that are shared like this lie where ``other`` looks for them."""
        return self.ranks == other.ranks
