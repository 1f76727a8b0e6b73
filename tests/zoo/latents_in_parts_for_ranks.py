"""Multi-Head Low-Rank Attention: the latent comes in parts, one for each rank. All heads attend to every part by
itself, with the same queries and with keys and values made of that part, and the outputs are added. Legal for each."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Carry, Usual, rope, rows

PARTS = 2
EXPECTED = Absorbed(PARTS)


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.down = r.linear(d.D, PARTS * d.L + d.R)
        self.norms = nn.ModuleList(r.norm(d.L) for _ in range(PARTS))
        self.ups = nn.ModuleList(r.linear(d.L, d.H * (d.N + d.V)) for _ in range(PARTS))

    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([PARTS * self.dims.L, self.dims.R], -1)
        c = torch.cat([norm(part) for norm, part in zip(self.norms, c.chunk(PARTS, -1), strict=True)], -1)
        start = c_past.shape[1]
        r = rope(r, torch.arange(start, start + x.shape[1]))
        return torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)

    def forward(self, x, c_past, r_past):
        c, r = self.append(x, c_past, r_past)
        q = self.queries(x, c_past.shape[1])
        o = 0.0
        for up, part in zip(self.ups, c.chunk(PARTS, -1), strict=True):
            k, v = self.heads(up(part)).split([self.dims.N, self.dims.V], -1)
            o = o + self.attend(q, self.join(k, r), v)
        return self.finish(o), c, r

    def heads(self, kv):
        return kv.unflatten(-1, (self.dims.H, -1)).transpose(1, 2)


build = Attention


def session(module):
    return Carry(module, *rows(module, PARTS * module.dims.L, module.dims.R))
