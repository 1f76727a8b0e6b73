"""A ring of fixed size: the position modulo the capacity is overwritten, and a buffer of positions says which slot
holds what; the mask comes from it. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, rope

EXPECTED = Absorbed()
SLOTS = 9


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("rows", torch.zeros(dims.B, SLOTS, dims.L + dims.R, dtype=dims.dtype))
        self.register_buffer("held", torch.full((SLOTS,), 10**6))

    def forward(self, x, positions):
        d = self.dims
        c, r = self.down(x).split([d.L, d.R], -1)
        slots = positions % SLOTS
        self.rows[:, slots] = torch.cat([self.norm(c), rope(r, positions)], -1)
        self.held[slots] = positions
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        c, r = self.rows.tensor_split([d.L], dim=-1)
        k, v = self.expand(c)
        scores = q @ self.join(k, r).transpose(-2, -1) * self.scale
        return self.finish(scores.masked_fill(self.held > positions[:, None], -torch.inf).softmax(-1) @ v)


build = Attention


def session(module):
    module.rows.zero_()
    module.held.fill_(10**6)
    position = 0

    def step(x):
        nonlocal position
        y = module(x, torch.arange(position, position + x.shape[1]))
        position += x.shape[1]
        return y

    return step
