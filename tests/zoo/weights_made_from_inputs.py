"""A hyper-network: the up-projection of K is generated from the newest token. What it is multiplied with is no weight:
refused."""

import torch

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("unsupported_op")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.make_k = self.random.linear(d.D, d.H * d.N * d.L)
        self.make_v = self.random.linear(d.D, d.H * d.V * d.L)

    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        w_k = self.make_k(x[:, -1]).view(-1, d.H, d.L, d.N)
        w_v = self.make_v(x[:, -1]).view(-1, d.H, d.L, d.V)
        k, v = c.unsqueeze(1) @ w_k, torch.einsum("btl,bhlv->bhtv", c, w_v)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c, r


build = Attention
session = carried
