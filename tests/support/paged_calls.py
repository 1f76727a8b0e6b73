"""One small call over pages, and the options it can have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

B, S, H, L, R, PAGE = 3, 2, 4, 24, 8, 16
LENS = (37, 0, 50)
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 5},
    {"softcap": 2.0, "sinks": torch.randn(H)},
    {"num_splits": 3},
    {"deterministic": True},
]


def pages(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """query, kv_pages [P,page,L+R] with NaN wherever no request has a token, block_table with -1 there, seq_lens."""
    g = torch.Generator().manual_seed(0)
    table = torch.full((B, 4), -1, dtype=torch.int32)
    table[0, :3] = torch.tensor([7, 1, 4])
    table[2] = torch.tensor([0, 6, 2, 5])
    cache = torch.randn(9, PAGE, L + R, generator=g)
    used = torch.zeros(9, PAGE, dtype=torch.bool)
    for b, length in enumerate(LENS):
        for t in range(length):
            used[table[b, t // PAGE], t % PAGE] = True
    cache[~used] = torch.nan
    query = torch.randn(B, S, H, L + R, generator=g)
    return {
        "query": query.to(dtype),
        "kv_pages": cache.to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
    }
