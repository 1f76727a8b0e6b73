"""Heads of two kinds, each with a latent and an up-projection of its own (local and global heads, say), joined as heads
before one attention. Split by heads, both are absorbed."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rope, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, 2 * d.H * (d.N + d.R), scale=2.0)
        self.down_2, self.up_2 = r.linear(d.D, d.L + 1), r.linear(d.L + 1, d.H * (d.N + d.V))
        self.out = r.linear(2 * d.H * d.V, d.D)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], 2 * d.H, d.N + d.R).transpose(1, 2)
        return torch.cat([q[..., : d.N], rope(q[..., d.N :], torch.arange(start, start + x.shape[1]))], -1)

    def forward(self, x, c_past, r_past, c_past_2):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        c_2 = torch.cat([c_past_2, torch.tanh(self.down_2(x))], 1)
        kv = torch.cat([y.view(*y.shape[:2], d.H, d.N + d.V) for y in (self.up(c), self.up_2(c_2))], 2)
        k, v = kv.transpose(1, 2).split([d.N, d.V], -1)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c, r, c_2


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R, d.L + 1))
