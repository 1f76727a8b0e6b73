"""Grouped latents whose products are written in a loop and stacked before the heads are told apart. Legal by halves."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Carry, Layer, causal, rows

EXPECTED = Absorbed()
G = 2


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, G * d.H * d.N, scale=2.0)
        self.down = r.linear(d.D, G * d.L)
        self.ups = torch.nn.ModuleList(r.linear(d.L, d.H * (d.N + d.V)) for _ in range(G))
        self.out = r.linear(G * d.H * d.V, d.D)

    def forward(self, x, past):
        d, heads = self.dims, G * self.dims.H
        B, S, _ = x.shape
        c = torch.cat([past, self.norm(self.down(x).view(B, S, G, d.L)).flatten(2)], 1)
        latents = c.view(B, c.shape[1], G, d.L)
        kv = torch.stack([up(latents[:, :, g]) for g, up in enumerate(self.ups)], 2)
        k, v = kv.reshape(B, c.shape[1], heads, d.N + d.V).transpose(1, 2).split([d.N, d.V], -1)
        q = self.q(x).view(B, S, heads, d.N).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(S, c.shape[1]))
        return self.out(o.transpose(1, 2).flatten(2)), c


build = Attention


def session(module):
    return Carry(module, *rows(module, G * module.dims.L))
