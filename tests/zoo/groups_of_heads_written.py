"""Grouped latent attention whose keys and values are written into zeros: half of the heads from each latent, then the
rotary key of all heads into the columns behind; values as wide as keys, for a kernel that asks for that. Split by
heads, each half is absorbed for itself."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope, rows

EXPECTED = Absorbed()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, 2 * d.H * (d.N + d.R), scale=2.0)
        self.down = r.linear(d.D, 2 * d.L + d.R)
        self.ups = torch.nn.ModuleList(r.linear(d.L, d.H * 2 * d.N, bias=True, scale=0.7) for _ in range(2))
        self.out = r.linear(2 * d.H * d.N, d.D)

    def forward(self, x, c_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + S)
        q = self.q(x).view(B, S, 2 * d.H, d.N + d.R)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :].transpose(1, 2), positions).transpose(1, 2)], -1)
        c, r = self.down(x).split([2 * d.L, d.R], -1)
        c, r = torch.cat([c_past, c], 1), torch.cat([r_past, rope(r, positions)], 1)
        T = c.shape[1]
        k = torch.zeros(B, T, 2 * d.H, d.N + d.R, dtype=x.dtype)
        v = torch.zeros_like(k)
        for half, up in enumerate(self.ups):
            kv = up(self.norm(c[..., half * d.L : (half + 1) * d.L])).view(B, T, d.H, 2 * d.N)
            heads = slice(half * d.H, (half + 1) * d.H)
            k[:, :, heads, : d.N] = kv[..., : d.N]
            v[:, :, heads, : d.N] = kv[..., d.N :]
        k[..., d.N :].copy_(r[:, :, None])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(S, T), scale=self.scale).transpose(1, 2)
        return self.out(o[..., : d.N].flatten(2)), c, r


build = Attention


def session(module):
    return Carry(module, *rows(module, 2 * module.dims.L, module.dims.R))
