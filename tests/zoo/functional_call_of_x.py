"""A hypernetwork: the weight of the up-projection depends on the input, so it is no weight to the
analysis. Refused."""

from torch.func import functional_call

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("unsupported_weight")


class Attention(LatentLayer):
    def expand(self, c):
        d = self.dims
        weight = self.up.weight * (1 + c.mean())
        return self.heads(functional_call(self.up, {"weight": weight}, (c,))).split([d.N, d.V], -1)


build = Attention
session = carried
