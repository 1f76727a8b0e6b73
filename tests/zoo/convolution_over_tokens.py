"""A causal Conv1d of width 3 over the expanded keys and values: each is made of three latents. Illegal."""

import torch.nn.functional as F
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("token_mixing")


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        wide = self.up.out_features
        self.conv = nn.Conv1d(wide, wide, 3, groups=wide, dtype=dims.dtype)
        self.conv.weight.data = self.random.tensor(*self.conv.weight.shape)
        self.conv.bias.data = self.random.tensor(*self.conv.bias.shape)

    def expand(self, c):
        kv = self.conv(F.pad(self.up(c).transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.heads(kv).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
