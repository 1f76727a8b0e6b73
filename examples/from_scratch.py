"""An attention layer written by hand, from no library: what counts is what it computes, not what anything is called."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile


class LatentAttention(nn.Module):
    """Multi-head Latent Attention that decodes against a cache of latent rows and shared rotary keys."""

    def __init__(self, D: int = 256, H: int = 8, L: int = 96, N: int = 32, R: int = 16, V: int = 40) -> None:
        super().__init__()
        self.sizes = (H, L, N, R, V)
        self.query = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.norm = nn.RMSNorm(L)
        self.up_key = nn.Parameter(torch.randn(H, L, N) / L**0.5)
        self.up_value = nn.Parameter(torch.randn(H, L, V) / L**0.5)
        self.out = nn.Linear(H * V, D, bias=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B,S,D] and ``cache`` [B,T,L+R] to the output [B,S,D] and the longer cache [B,T+S,L+R]."""
        (B, S, _), (H, L, N, R, _) = x.shape, self.sizes
        start = cache.shape[1]
        q, q_rot = self.query(x).view(B, S, H, N + R).transpose(1, 2).split([N, R], dim=-1)
        latent, k_rot = self.down(x).split([L, R], dim=-1)
        cache = torch.cat([cache, torch.cat([self.norm(latent), rotate(k_rot, start)], dim=-1)], dim=1)
        latent, k_rot = cache.split([L, R], dim=-1)
        k = torch.einsum("btl,hln->bhtn", latent, self.up_key)
        v = torch.einsum("btl,hlv->bhtv", latent, self.up_value)
        q = torch.cat([q, rotate(q_rot, start)], dim=-1)
        k = torch.cat([k, k_rot[:, None].expand(-1, H, -1, -1)], dim=-1)
        visible = torch.ones(S, cache.shape[1], dtype=torch.bool).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(y.transpose(1, 2).flatten(2)), cache


def rotate(x: Tensor, start: int) -> Tensor:
    """RoPE on the last axis of ``x`` [..., S, R], whose first token has position ``start``."""
    half = x.shape[-1] // 2
    position = torch.arange(start, start + x.shape[-2])[:, None]
    angle = position * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def main(arguments: list[str] | None = None) -> None:
    """Decode one token against cached ones, both ways, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1000, help="cached tokens")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    layer = LatentAttention().eval()
    x, cache = torch.randn(2, 1, 256), torch.randn(2, given.context, 96 + 16)
    fast = mla_compile.optimize(layer)
    with torch.no_grad():
        expected, _ = layer(x, cache)
        result, _ = fast(x, cache)
        print(mla_compile.explain(layer, x, cache))
    print(f"largest difference: {(result - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
