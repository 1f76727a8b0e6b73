"""The up-projection is an nn.Conv1d of kernel size 1 over [B,L,T]. Legal: such a convolution is a matrix product."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.conv = nn.Conv1d(d.L, d.H * (d.N + d.V), 1, dtype=d.dtype)
        with torch.no_grad():
            self.conv.weight.copy_(self.random.tensor(*self.conv.weight.shape, scale=0.4))
            self.conv.bias.copy_(self.random.tensor(*self.conv.bias.shape))

    def expand(self, c):
        d = self.dims
        kv = self.conv(c.transpose(1, 2)).view(c.shape[0], d.H, d.N + d.V, -1).transpose(2, 3)
        k, v = kv.split([d.N, d.V], dim=-1)
        return k, v


build = Attention
session = carried
