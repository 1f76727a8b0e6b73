"""Random lists of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def lists(B: int, S: int, T: int, k: int, *, empty: float = 0.2, seed: int = 1) -> Tensor:
    """[B,S,k] int32: distinct keys in any order, and entries that name none."""
    g = torch.Generator().manual_seed(seed)
    index = torch.rand(B, S, T, generator=g).argsort(-1)[..., :k].int()
    none = torch.where(torch.rand(index.shape, generator=g) < 0.5, -1, T)
    return index.where(torch.rand(index.shape, generator=g) >= empty, none.int())
