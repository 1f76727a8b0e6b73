"""An adapter beside the up-projection, scaled and added (loralib). Legal: the sum of two maps of one latent."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.a = self.random.linear(dims.L, 2)
        self.b = self.random.linear(2, self.up.out_features)

    def expand(self, c):
        kv = self.up(c) + self.b(self.a(c)) * 0.7
        return self.heads(kv).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
