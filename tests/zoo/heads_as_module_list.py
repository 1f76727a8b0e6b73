"""One small nn.Linear per head and matrix in ModuleLists, their results stacked for one attention. Legal: a stack of
maps of one latent is a map of it."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.k_heads = nn.ModuleList(r.linear(d.L, d.N) for _ in range(d.H))
        self.v_heads = nn.ModuleList(r.linear(d.L, d.V) for _ in range(d.H))

    def expand(self, c):
        k = torch.stack([head(c) for head in self.k_heads], dim=1)
        v = torch.stack([head(c) for head in self.v_heads], dim=1)
        return k, v


build = Attention
session = carried
