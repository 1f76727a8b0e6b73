"""int4 in pairs of a byte, with scale and zero point a group of columns, unpacked in forward (GPTQ and AWQ in plain
PyTorch). Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Int4Linear(nn.Module):
    """Groups run along the output rows, which keeps any latent width possible."""

    def __init__(self, linear):
        super().__init__()
        columns = linear.weight.detach().T  # [in, out]
        if columns.shape[1] % 2:
            columns = F.pad(columns, (0, 1))
        self.out_features = linear.out_features
        low, high = columns.amin(1, keepdim=True), columns.amax(1, keepdim=True)
        scale = (high - low) / 15
        digits = ((columns - low) / scale).round().to(torch.uint8)
        self.register_buffer("packed", digits[:, 0::2] | (digits[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", low)

    def forward(self, x):
        digits = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)
        weight = digits.to(x.dtype) * self.scale + self.zero
        return x @ weight[:, : self.out_features]


def build(dims):
    layer = LatentLayer(dims)
    layer.up = Int4Linear(layer.up)
    return layer


session = carried
