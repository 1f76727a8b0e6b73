"""A short causal convolution over the tokens of each channel of the expanded keys and values (Mamba, Canon layers).
Illegal."""

import torch.nn.functional as F

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("token_mixing")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.taps = self.random.weight(dims.H * (dims.N + dims.V), 1, 3)

    def expand(self, c):
        d = self.dims
        kv = F.conv1d(F.pad(self.up(c).transpose(1, 2), (2, 0)), self.taps, groups=self.taps.shape[0])
        kv = kv.transpose(1, 2).view(c.shape[0], c.shape[1], d.H, d.N + d.V).transpose(1, 2)
        k, v = kv.split([d.N, d.V], -1)
        return k, v


build = Attention
session = carried
