"""Batch norm over the features of the expanded keys, in evaluation mode: a fixed scale and shift a feature. Legal,
unlike a norm whose statistics are those of the key at hand."""

from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.normalize = nn.BatchNorm1d(self.up.out_features, dtype=dims.dtype)
        self.normalize.running_mean.copy_(self.random.tensor(self.up.out_features, scale=1.0))
        self.normalize.running_var.copy_(self.random.tensor(self.up.out_features, scale=1.0).square() + 0.1)

    def expand(self, c):
        kv = self.normalize(self.up(c).transpose(1, 2)).transpose(1, 2)
        return self.heads(kv).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
