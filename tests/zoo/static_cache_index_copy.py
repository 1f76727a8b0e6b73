"""A static cache as serving code has it: buffers written by index_copy_ at tensor positions, attention over their full
length with a mask that hides what is not written yet. Legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Usual, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("c", torch.zeros(dims.B, CAPACITY, dims.L, dtype=dims.dtype))
        self.register_buffer("r", torch.zeros(dims.B, CAPACITY, dims.R, dtype=dims.dtype))

    def forward(self, x, positions):
        d = self.dims
        c, r = self.down(x).split([d.L, d.R], -1)
        self.c.index_copy_(1, positions, self.norm(c))
        self.r.index_copy_(1, positions, rope(r, positions))
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        k, v = self.expand(self.c)
        keep = torch.arange(CAPACITY) <= positions[:, None]
        scores = torch.where(keep, q @ self.join(k, self.r).mT * self.scale, torch.finfo(x.dtype).min)
        return self.finish(scores.softmax(-1) @ v)


build = Attention


def session(module):
    module.c.zero_()
    module.r.zero_()
    position = 0

    def step(x):
        nonlocal position
        y = module(x, torch.arange(position, position + x.shape[1]))
        position += x.shape[1]
        return y

    return step
