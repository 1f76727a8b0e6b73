"""Multi-head low-rank attention (MLRA): four latents in one product; two branches of the same queries attend over two
of them each, half of the heads over one, and are added up. Split by heads, all of it is absorbed."""

import torch

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope, rows

EXPECTED = Absorbed(2)
G = 4


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, 2 * d.H * (d.N + d.R), scale=2.0)
        self.down = r.linear(d.D, G * d.L + d.R)
        self.w = r.weight(G, d.L, d.H * (d.N + d.V), scale=0.4)
        self.out = r.linear(2 * d.H * d.V, d.D)

    def forward(self, x, c_past, r_past):
        d, heads = self.dims, 2 * self.dims.H
        B, S, _ = x.shape
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + S)
        c, r = self.down(x).split([G * d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c.view(B, S, G, d.L)).flatten(2)], 1)
        r = torch.cat([r_past, rope(r, positions)], 1)
        T = c.shape[1]
        kv = torch.einsum("btgl,glk->btgk", c.view(B, T, G, d.L), self.w).view(B, T, G, d.H, d.N + d.V)
        q = self.q(x).view(B, S, heads, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        shared = r.unsqueeze(1).expand(-1, heads, -1, -1)
        y = 0
        for branch in (kv[:, :, : G // 2], kv[:, :, G // 2 :]):
            k, v = branch.reshape(B, T, heads, d.N + d.V).transpose(1, 2).split([d.N, d.V], -1)
            scores = q @ torch.cat([k, shared], -1).mT * self.scale
            y = y + scores.masked_fill(~causal(S, T), float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2)), c, r


build = Attention


def session(module):
    return Carry(module, *rows(module, G * module.dims.L, module.dims.R))
