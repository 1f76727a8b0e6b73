"""Expanded keys and values are multiplied by a gate per head that is computed from the latent. Illegal: the factor
differs from token to token."""

import torch

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("unsupported_op")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.gate = self.random.linear(dims.L, dims.H, bias=True)

    def expand(self, c):
        k, v = super().expand(c)
        gate = torch.sigmoid(self.gate(c)).transpose(1, 2).unsqueeze(-1)
        return k * gate, v * gate


build = Attention
session = carried
