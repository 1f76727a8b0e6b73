"""Weight-only int8 by hand: int8 rows and a scale a row, multiplied in forward (gpt-fast's quantize.py). Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Int8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (linear.weight.detach() / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


def build(dims):
    layer = LatentLayer(dims)
    layer.up = Int8Linear(layer.up)
    return layer


session = carried
