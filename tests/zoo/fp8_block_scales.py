"""DeepSeek-V3's checkpoints: float8 weights with one scale for each block of rows and columns, dequantized in forward
without a kernel of their own. Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()
BLOCK = 4  # 128 in the checkpoints


class Fp8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        blocks = self.tiles(linear.weight.detach())
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
        self.register_buffer(
            "weight", (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        )
        self.register_buffer("weight_scale_inv", scale)

    def tiles(self, weight):
        rows, columns = weight.shape
        padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))

    def forward(self, x):
        blocks = self.weight.to(x.dtype).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        weight = (blocks * self.weight_scale_inv[:, None, :, None]).flatten(2).flatten(0, 1)
        return F.linear(x, weight[: self.shape[0], : self.shape[1]])


def build(dims):
    layer = LatentLayer(dims)
    layer.up = Fp8Linear(layer.up)
    return layer


session = carried
