"""A ring of latents that is put in order of time after the up-projection: K and V are joined from the slots behind the
newest token and those up to it. Two slices of the rows, joined as tokens: the order of keys is no part of attention
without a mask, but the analysis takes no two slices for one tensor of rows. Refused."""

import torch

from mla_compile.codes import Code
from tests.zoo.base import Refused, Usual, rope

EXPECTED, EXPORTED = Refused("unsupported_op"), Refused(Code.TOKEN_MIXING)  # which fixed lengths show
SLOTS = 9


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("c", torch.zeros(dims.B, SLOTS, dims.L, dtype=dims.dtype))
        self.register_buffer("r", torch.zeros(dims.B, SLOTS, dims.R, dtype=dims.dtype))

    def forward(self, x, start: int):
        S = x.shape[1]
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        slots = torch.arange(start, start + S) % SLOTS
        self.c[:, slots], self.r[:, slots] = self.norm(c), rope(r, torch.arange(start, start + S))
        k, v = self.expand(self.c)
        k, next_slot = self.join(k, self.r), (start + S) % SLOTS
        k, v = (torch.cat([y[:, :, next_slot:], y[:, :, :next_slot]], 2) for y in (k, v))
        age = torch.arange(SLOTS - 1, -1, -1)  # of the key in each place, in tokens before the newest one
        hidden = (age >= start + S) | (age < torch.arange(S - 1, -1, -1)[:, None])
        scores = (self.queries(x, start) @ k.mT * self.scale).masked_fill(hidden, -torch.inf)
        return self.finish(scores.softmax(-1) @ v)


build = Attention


def session(module):
    module.c.zero_()
    module.r.zero_()
    start = 0

    def step(x):
        nonlocal start
        y = module(x, start)
        start += x.shape[1]
        return y

    return step
