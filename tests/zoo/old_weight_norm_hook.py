"""The older torch.nn.utils.spectral_norm: a forward pre-hook that sets the weight before each call. Legal."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


def build(dims):
    layer = LatentLayer(dims)
    torch.manual_seed(dims.seed)
    torch.nn.utils.spectral_norm(layer.up)
    return layer


session = carried
