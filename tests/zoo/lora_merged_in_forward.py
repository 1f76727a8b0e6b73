"""The adapter merged into the weight in each forward (lit-llama's merged linear). Legal: a product of weights."""

import torch.nn.functional as F

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.a = self.random.weight(2, dims.L)
        self.b = self.random.weight(self.up.out_features, 2)

    def expand(self, c):
        kv = F.linear(c, self.up.weight + 0.7 * (self.b @ self.a))
        return self.heads(kv).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
