"""Narrow rows of two caches are joined before the up-projection. Legal: the joined rows are the latent."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, a_past, b_past, r_past):
        start = a_past.shape[1]
        a, b, r = self.down(x).split([3, self.dims.L - 3, self.dims.R], -1)
        a, b, r = (torch.cat(pair, 1) for pair in ((a_past, a), (b_past, b), (r_past, r)))
        k, v = self.expand(torch.cat([a, b], -1))
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), a, b, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, 3, d.L - 3, d.R))
