"""A mixture of adapters: a gate computed from each token weighs the adapter (MoLoRA). Legal: g (B A c) is B (g A c),
an image of a second row that is made of the latent in each call."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.a = self.random.linear(dims.L, 2)
        self.b = self.random.linear(2, self.up.out_features)
        self.gate = self.random.linear(dims.L, 1)

    def expand(self, c):
        kv = self.up(c) + self.b(self.a(c)) * self.gate(c).sigmoid()
        return self.heads(kv).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
