"""Mixture of up-projections: each token picks one of several matrices for its keys and values. Illegal: the map is not
the same for all rows."""

import torch

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("nonlinear")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.router = self.random.linear(dims.L, 2)
        self.up2 = self.random.linear(dims.L, dims.H * (dims.N + dims.V))

    def expand(self, c):
        d = self.dims
        first = self.router(c).argmax(-1, keepdim=True) == 0
        kv = torch.where(first, self.up(c), self.up2(c)).view(c.shape[0], -1, d.H, d.N + d.V).transpose(1, 2)
        k, v = kv.split([d.N, d.V], -1)
        return k, v


build = Attention
session = carried
