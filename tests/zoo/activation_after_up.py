"""A SiLU on the expanded keys and values, as in an MLP. Illegal."""

import torch.nn.functional as F

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("nonlinear")


class Attention(Usual):
    def expand(self, c):
        k, v = super().expand(c)
        return F.silu(k), F.silu(v)


build = Attention
session = carried
