"""torch.func.functional_call on the up-projection with the weights of a ParameterDict (meta-learning code).
Legal, but Dynamo compiles that call by itself and the core gets K and V as inputs; torch.export sees all of it."""

from torch import nn
from torch.func import functional_call

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Refused, carried

EXPECTED = Refused("expanded_inputs")
EXPORTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.fast = nn.ParameterDict({"weight": self.random.weight(*self.up.weight.shape)})

    def expand(self, c):
        d = self.dims
        return self.heads(functional_call(self.up, dict(self.fast), (c,))).split([d.N, d.V], -1)


build = Attention
session = carried
