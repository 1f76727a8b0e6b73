"""Block scales spread over the weight by repeat_interleave, the way most conversion scripts write it. Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()
BLOCK = 4


class Fp8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        rows, columns = (-(-n // BLOCK) for n in weight.shape)
        self.register_buffer("scale", 0.5 + torch.arange(rows * columns).view(rows, columns).to(weight.dtype) / 10)
        self.register_buffer(
            "weight", (weight / self.spread()[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn)
        )

    def spread(self):
        return self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    def forward(self, x):
        rows, columns = self.weight.shape
        return F.linear(x, self.weight.to(x.dtype) * self.spread()[:rows, :columns])


def build(dims):
    layer = LatentLayer(dims)
    layer.up = Fp8Linear(layer.up)
    return layer


session = carried
