"""A graph break in forward, after the cache was written: expansion and core share the second graph. Legal."""

from torch._dynamo import graph_break

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def forward(self, x, c_past, r_past):
        q, c, r = self.rows(x, c_past, r_past)
        graph_break()
        k, v = self.expand(c)
        return self.finish(self.attend(q, self.join(k, r), v)), c, r


build = Attention
session = carried
