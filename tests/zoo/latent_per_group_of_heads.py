"""Grouped latent attention (GLA): two latents, each expanded by half of the heads, in one product; one rotary key for
all. As one attention its heads read different rows; split by heads, each half is absorbed for itself."""

import torch

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope, rows

EXPECTED = Absorbed()
G = 2


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, G * d.H * (d.N + d.R), scale=2.0)
        self.down = r.linear(d.D, G * d.L + d.R)
        self.w = r.weight(G, d.L, d.H * (d.N + d.V), scale=0.4)
        self.out = r.linear(G * d.H * d.V, d.D)

    def forward(self, x, c_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + S)
        c, r = self.down(x).split([G * d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c.view(B, S, G, d.L)).flatten(2)], 1)
        r = torch.cat([r_past, rope(r, positions)], 1)
        T = c.shape[1]
        kv = torch.einsum("btgl,glk->bgtk", c.view(B, T, G, d.L), self.w).view(B, G, T, d.H, d.N + d.V)
        k, v = kv.transpose(2, 3).flatten(1, 2).split([d.N, d.V], -1)
        k = torch.cat([k, r.unsqueeze(1).expand(-1, G * d.H, -1, -1)], -1)
        q = self.q(x).view(B, S, G * d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        scores = (q @ k.mT * self.scale).masked_fill(~causal(S, T), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), c, r


build = Attention


def session(module):
    return Carry(module, *rows(module, G * module.dims.L, module.dims.R))
