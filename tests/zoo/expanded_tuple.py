"""Early MLA ports: K and V are expanded once per token, and the tuple of both, per head, is the cache."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Carry, Usual, rows

EXPECTED = EXPANDED_CACHE


class Attention(Usual):
    def forward(self, x, k_past, v_past):
        start = k_past.shape[2]
        empty = x.new_zeros(x.shape[0], start, self.dims.L), x.new_zeros(x.shape[0], start, self.dims.R)
        c, r = (rows[:, start:] for rows in self.append(x, *empty))
        k, v = self.expand(c)
        k, v = torch.cat([k_past, self.join(k, r)], 2), torch.cat([v_past, v], 2)
        return self.finish(self.attend(self.queries(x, start), k, v)), k, v


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.N + d.R, heads=d.H), *rows(module, d.V, heads=d.H))
