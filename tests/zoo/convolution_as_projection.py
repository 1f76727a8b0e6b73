"""The up-projection is a Conv1d of width 1 over channels-first latents (vision code). Legal: it mixes no tokens."""

from torch import nn

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.conv = nn.Conv1d(dims.L, self.up.out_features, 1, dtype=dims.dtype)
        self.conv.weight.data = self.random.tensor(*self.conv.weight.shape, scale=dims.L**-0.5)
        self.conv.bias.data = self.random.tensor(*self.conv.bias.shape)

    def expand(self, c):
        return self.heads(self.conv(c.transpose(1, 2)).transpose(1, 2)).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
