"""A paged cache: latents lie in pages of a pool, a table of page numbers per sequence gathers them. Legal: the gather
comes before the up-projection, and what it gathers are rows."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Usual, rope

EXPECTED = Absorbed()
PAGE = 4


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        pages = dims.B * CAPACITY // PAGE
        self.register_buffer("pool", torch.zeros(pages, PAGE, dims.L + dims.R, dtype=dims.dtype))

    def forward(self, x, positions, table):
        d = self.dims
        B = x.shape[0]
        c, r = self.down(x).split([d.L, d.R], -1)
        new = torch.cat([self.norm(c), rope(r, positions)], -1)
        self.pool[table[:, positions // PAGE], positions % PAGE] = new
        c, r = self.pool[table].view(B, -1, d.L + d.R).split([d.L, d.R], -1)
        q = self.q(x).view(B, x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        k, v = self.expand(c)
        keep = torch.arange(c.shape[1]) <= positions[:, None]
        scores = (q @ self.join(k, r).mT * self.scale).masked_fill(~keep, float("-inf"))
        return self.finish(scores.softmax(-1) @ v)


build = Attention


def session(module):
    module.pool.zero_()
    d = module.dims
    table = torch.randperm(d.B * CAPACITY // PAGE, generator=torch.Generator().manual_seed(3)).view(d.B, -1)
    position = 0

    def step(x):
        nonlocal position
        y = module(x, torch.arange(position, position + x.shape[1]), table)
        position += x.shape[1]
        return y

    return step
