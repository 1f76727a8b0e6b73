"""The layer that the unusual styles of the zoo vary: its latent rows, its expansion and its core are methods."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Carry, Layer, causal, rope, rows


class LatentLayer(Layer):
    """``forward(x, c_past, r_past)`` returns y [B,S,D] and the cache of latents and rotated keys with x's rows added."""

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B,H,S,N+R]."""
        d = self.dims
        q_nope, q_rope = self.q(x).unflatten(-1, (d.H, -1)).transpose(1, 2).split([d.N, d.R], -1)
        return torch.cat([q_nope, rope(q_rope, positions)], -1)

    def latent(self, c: Tensor) -> Tensor:
        return self.norm(c)

    def expand(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """K without its rotary part [B,H,T,N] and V [B,H,T,V]."""
        d = self.dims
        return self.heads(self.up(c)).split([d.N, d.V], -1)

    def heads(self, kv: Tensor) -> Tensor:
        return kv.unflatten(-1, (self.dims.H, -1)).transpose(1, 2)

    def join(self, k: Tensor, r: Tensor) -> Tensor:
        return torch.cat([k, r[:, None].expand(-1, k.shape[1], -1, -1)], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[-2], k.shape[-2]))

    def rows(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, and the cache with the rows of x."""
        d = self.dims
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + x.shape[1])
        c, r = self.down(x).split([d.L, d.R], -1)
        c, r = torch.cat([c_past, self.latent(c)], 1), torch.cat([r_past, rope(r, positions)], 1)
        return self.query(x, positions), c, r

    def forward(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> Any:
        q, c, r = self.rows(x, c_past, r_past)
        k, v = self.expand(c)
        o = self.attend(q, self.join(k, r), v)
        return self.out(o.transpose(1, 2).flatten(2)), c, r


def session(module: Any) -> Carry:
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R))
