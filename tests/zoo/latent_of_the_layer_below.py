"""Two attention layers over one latent cache: the upper layer expands the lower one's latents with its own weights
(cross-layer sharing, YOCO and CLA). Legal, twice."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed(2)


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.upper_q = self.random.linear(dims.D, dims.H * dims.N, scale=2.0)
        self.upper_up = self.random.linear(dims.L, dims.H * (dims.N + dims.V))
        self.upper_out = self.random.linear(dims.H * dims.V, dims.D)

    def forward(self, x, c_past, r_past):
        y, c, r = super().forward(x, c_past, r_past)
        d = self.dims
        x = x + y
        q = self.heads(self.upper_q(x))
        k, v = self.heads(self.upper_up(c)).split([d.N, d.V], -1)
        return x + self.upper_out(self.attend(q, k, v).transpose(1, 2).flatten(2)), c, r


build = Attention
session = carried
