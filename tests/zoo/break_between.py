"""A graph break between the up-projection and the core: the graph with the softmax has K and V as plain inputs, and
what makes them is out of its sight. Refused; torch.export sees no break."""

from torch._dynamo import graph_break

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Refused, carried

EXPECTED = Refused("graph_break")
EXPORTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        graph_break()
        return super().attend(q, k, v)


build = Attention
session = carried
