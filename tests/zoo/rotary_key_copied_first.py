"""The rotary key is copied to all heads first, and then rotated as one of every head; the cache holds it as it was
before, and all of it is rotated again in every step. Legal: the copies are told apart by nothing."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def join(self, k, r):
        r = r.unsqueeze(2).repeat(1, 1, self.dims.H, 1).transpose(1, 2)
        return torch.cat([k, rope(r, torch.arange(r.shape[2]))], -1)


build = Attention
session = carried
