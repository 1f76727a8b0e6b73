"""A small MLA written in plain PyTorch, with a cache that grows and one that is written in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D, H, L, N, R, V = 32, 4, 16, 12, 6, 10


class Toy(nn.Module):
    """MLA over rows [latent, rope] that the caller keeps; returns (y [B,S,D], rows [B,T,L+R])."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.q = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.up = nn.Linear(L, H * (N + V), bias=False)
        self.out = nn.Linear(H * V, D, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([rows, self.down(x)], dim=1)
        return self.attend(x, rows, None), rows

    def attend(self, x: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        B, S, _ = x.shape
        T = rows.shape[1]
        q_BHSK = self.q(x).view(B, S, H, N + R).transpose(1, 2)
        latent, rope = rows.split([L, R], dim=-1)
        k, v = self.up(latent).view(B, T, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
        o = F.scaled_dot_product_attention(q_BHSK, k, v, attn_mask=mask)
        return self.out(o.transpose(1, 2).reshape(B, S, H * V))


class Buffered(Toy):
    """The same with a cache of fixed capacity in a buffer, written in place; returns a dict."""

    def __init__(self, batch: int = 2, capacity: int = 24) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(batch, capacity, L + R), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> dict[str, Any]:
        self.rows[:, position] = self.down(x)
        mask = (torch.arange(self.rows.shape[1]) <= position[-1])[None, None, None]
        return {"y": self.attend(x, self.rows, mask), "none": None}


def decode_inputs(
    batch: int = 2, cached: int = 19, queries: int = 1, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B,S,D] and cached rows [B,T,L+R]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, queries, D, generator=generator),
        torch.randn(batch, cached, L + R, generator=generator),
    )
