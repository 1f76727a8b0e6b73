"""Separate linears for K and V, and caches with a head axis of 1, as the Cache of transformers holds them. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, rope, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.k_up = self.random.linear(dims.L, dims.H * dims.N)
        self.v_up = self.random.linear(dims.L, dims.H * dims.V)

    def forward(self, x, past):
        d = self.dims
        c_past, r_past = past
        B, S, _ = x.shape
        start = c_past.shape[2]
        c, r = self.down(x).split([d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c).view(B, 1, S, d.L)], dim=2)
        r = torch.cat([r_past, rope(r.view(B, 1, S, d.R), torch.arange(start, start + S))], dim=2)
        T = c.size(2)
        k = self.k_up(c).view(B, T, d.H, d.N).transpose(1, 2)
        v = self.v_up(c).view(B, T, d.H, d.V).transpose(1, 2)
        k = torch.cat((k, r.expand(B, d.H, T, d.R)), dim=-1)
        return self.finish(self.attend(self.queries(x, start), k, v)), (c, r)


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        self.module = module
        self.cache = tuple(c for w in (module.dims.L, module.dims.R) for c in rows(module, w, heads=1))

    def __call__(self, x):
        y, self.cache = self.module(x, self.cache)
        return y
