"""A mixture of adapters: a gate computed from each token weighs the adapter (MoLoRA). Illegal: the map differs from
token to token."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("unsupported_op")


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
