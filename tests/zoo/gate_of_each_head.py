"""A sigmoid of the input scales what every head returns, number by number, before the output projection (Kimi K3).
Legal: the gate stands behind the values' weight. That weight is absorbed, but cannot be folded into the output's."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.gate = self.random.linear(dims.D, dims.H * dims.V)

    def forward(self, x, c_past, r_past):
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        o = self.attend(self.queries(x, c_past.shape[1]), self.join(k, r), v)
        gate = torch.sigmoid(self.gate(x)).unflatten(-1, (self.dims.H, -1)).transpose(1, 2)
        return self.finish(o * gate), c, r


build = Attention
session = carried
