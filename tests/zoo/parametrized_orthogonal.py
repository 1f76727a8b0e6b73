"""torch.nn.utils.parametrizations.orthogonal on the up-projection (the Cayley map: a linear solve in each forward, but
of weights only). Legal."""

import torch
from torch.nn.utils.parametrizations import orthogonal

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


def build(dims):
    layer = LatentLayer(dims)
    torch.manual_seed(dims.seed)  # its base is random
    orthogonal(layer.up, orthogonal_map="cayley")
    return layer


session = carried
