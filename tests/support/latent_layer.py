"""The layer that the unusual styles of the zoo vary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.zoo.base import Dims, Usual


class LatentLayer(Usual):
    """:class:`Usual` with a method for the heads of a projection, and one for all rows that a step needs."""

    def heads(self, kv: Tensor) -> Tensor:
        return kv.unflatten(-1, (self.dims.H, -1)).transpose(1, 2)

    def expand(self, c: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.heads(self.up(c)).split([self.dims.N, self.dims.V], -1)
        return k, v

    def rows(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, and the cache with the rows of x."""
        return self.queries(x, c_past.shape[1]), *self.append(x, c_past, r_past)


class InPrecision(LatentLayer):
    """A layer of another dtype than the test's; x and y are of the test's."""

    dtype = torch.float32

    def __init__(self, dims: Dims) -> None:
        super().__init__(Dims(**{**vars(dims), "dtype": self.dtype}))

    def forward(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> Any:
        y, c, r = super().forward(x.to(self.dtype), c_past, r_past)
        return y.to(x.dtype), c, r
