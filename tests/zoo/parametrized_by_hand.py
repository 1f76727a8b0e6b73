"""A parametrization of one's own, in which the weight is a low-rank product with a gate a row. Legal."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, weight):
        return torch.sigmoid(self.gate)[:, None] * weight.tanh()


def build(dims):
    layer = LatentLayer(dims)
    parametrize.register_parametrization(layer.up, "weight", Gated(layer.random.weight(layer.up.out_features)))
    return layer


session = carried
