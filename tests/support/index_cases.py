"""Calls of the indexer, and their comparison with the equation in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels import reference
from mla_compile.kernels.call import IndexCall

# Of the largest sum of the absolute products: what adding up rounds, however much of it cancels.
TOLERANCE = {torch.float64: 1e-14}


@dataclass(frozen=True)
class IndexCase:
    """Sizes of one call, all different and no powers of two, and what its numbers are like."""

    B: int = 2
    S: int = 3
    J: int = 5
    T: int = 301
    D: int = 37
    scale: float = 0.3
    spread: float = 1.0  # of the weights
    query: torch.dtype | None = None  # beside half precision
    strided: bool = False

    def call(self, dtype: torch.dtype, seed: int = 0) -> IndexCall:
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int, of: torch.dtype) -> Tensor:
            wide = torch.randn(*shape[:-1], shape[-1] + 3 * self.strided, generator=g, dtype=torch.float64).to(of)
            return wide[..., : shape[-1]]

        weights = torch.float64 if dtype == torch.float64 else torch.float32
        query, keys = random(self.B, self.S, self.J, self.D, of=self.query or dtype), (self.B, self.T, self.D)
        rows = random(*keys, of=dtype)
        if self.strided:  # every other row of a cache, by sequence last
            rows = rows.repeat_interleave(2, 1)[:, ::2].transpose(0, 1).contiguous().transpose(0, 1)
        return IndexCall(query, rows, random(self.B, self.S, self.J, of=weights) * self.spread, self.scale)


CASES: dict[str, IndexCase] = {
    "odd sizes": IndexCase(),
    "a decode step": IndexCase(B=1, S=1, J=64, D=128, T=1000),
    "more heads than a walk takes": IndexCase(B=1, S=2, J=130, T=97),
    "one head": IndexCase(J=1),
    "one key": IndexCase(T=1),
    "one feature": IndexCase(D=1),
    "many queries": IndexCase(B=1, S=150, T=150, J=3, D=8),
    "a negative scale": IndexCase(scale=-0.7),
    "no scale": IndexCase(scale=1.0),
    "large numbers": IndexCase(scale=1e6, spread=1e5),
    "small numbers": IndexCase(scale=1e-6, spread=1e-5),
    "strided": IndexCase(strided=True),
    "wide rows": IndexCase(D=640, J=17, T=70),
}


def close(got: Tensor, call: IndexCall) -> None:
    """Compares with the equation in float64."""
    q, k, w, scale = call
    wide = IndexCall(q.double(), k.double(), w.double(), scale)
    want = reference.index_scores(wide)
    largest = reference.index_scores(IndexCall(wide.query.abs(), wide.keys.abs(), wide.weights.abs(), abs(scale)))
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert got.dtype == (torch.float64 if k.dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE.get(k.dtype, 1e-6)
    assert ((got - want).abs() <= tolerance * largest).all(), k.dtype
