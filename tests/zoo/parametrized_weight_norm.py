"""torch.nn.utils.parametrizations.weight_norm on the up-projection: the weight is computed in each forward, from
weights only. Legal."""

from torch.nn.utils.parametrizations import weight_norm

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


def build(dims):
    layer = LatentLayer(dims)
    weight_norm(layer.up)
    return layer


session = carried
