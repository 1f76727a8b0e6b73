"""A graph break (an item() that a print shows) before the up-projection: it and the core share the second graph. Legal."""

from torch._dynamo import graph_break

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()
EXPORTED = Absorbed()


class Attention(LatentLayer):
    def expand(self, c):
        graph_break()
        return super().expand(c)


build = Attention
session = carried
