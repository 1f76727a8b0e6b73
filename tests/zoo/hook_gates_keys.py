"""A forward hook on the up-projection that applies a nonlinearity, out of sight in the class's code. Illegal."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("nonlinear")


def build(dims):
    layer = LatentLayer(dims)
    layer.up.register_forward_hook(lambda _, args, result: result.tanh())
    return layer


session = carried
