"""The rotary key is copied to all heads and then rotated by a function that reads its input for shape and dtype, too:
it writes into memory like it, and casts to its type. Legal: a copy that is looked at is a copy."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, rope

EXPECTED = Absorbed()


def turned(x):
    whole = torch.empty_like(x)
    whole[..., :] = rope(x, torch.arange(x.shape[2]))
    return whole.type_as(x)


class Attention(Usual):
    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def join(self, k, r):
        return torch.cat([k, turned(r.unsqueeze(1).expand(-1, self.dims.H, -1, -1))], -1)


build = Attention
session = carried
