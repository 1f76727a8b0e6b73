"""A forward_pre_hook on the up-projection that multiplies the latent by a constant and a vector of weights, and a
forward hook that clones its result. Legal."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


def build(dims):
    layer = LatentLayer(dims)
    layer.gain = layer.random.weight(dims.L, scale=1.0)
    layer.up.register_forward_pre_hook(lambda _, args: (args[0] * layer.gain * 1.5,))
    layer.up.register_forward_hook(lambda _, args, result: result.clone())
    return layer


session = carried
