"""A ParameterList with one matrix a head, and a loop that stacks the heads. Legal: every head reads one latent."""

import torch
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.w_k = nn.ParameterList([self.random.weight(dims.L, dims.N) for _ in range(dims.H)])
        self.w_v = nn.ParameterList([self.random.weight(dims.L, dims.V) for _ in range(dims.H)])

    def expand(self, c):
        return torch.stack([c @ w for w in self.w_k], 1), torch.stack([c @ w for w in self.w_v], 1)


build = Attention
session = carried
