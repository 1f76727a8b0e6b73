"""Two compressions, one for keys and one for values, each cached for itself. Legal: the rows are [c_k, r, c_v]."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.k_up, self.v_up = r.linear(d.L, d.H * d.N), r.linear(d.L - 1, d.H * d.V)
        self.v_down = r.linear(d.D, d.L - 1)

    def forward(self, x, k_past, v_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        start = k_past.shape[1]
        c_k, r = self.append(x, k_past, r_past)
        c_v = torch.cat([v_past, self.v_down(x)], 1)
        k = self.k_up(c_k).view(B, start + S, d.H, d.N).transpose(1, 2)
        v = self.v_up(c_v).view(B, start + S, d.H, d.V).transpose(1, 2)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c_k, c_v, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.L - 1, d.R))
