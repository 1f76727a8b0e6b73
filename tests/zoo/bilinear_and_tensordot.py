"""torch.tensordot for the up-projections and torch.inner for the query. Legal: they are products by a weight."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.w_k = self.random.weight(dims.L, dims.H, dims.N, scale=dims.L**-0.5)
        self.w_v = self.random.weight(dims.H, dims.V, dims.L)

    def expand(self, c):
        k = torch.tensordot(c, self.w_k, dims=1)
        v = torch.tensordot(c, self.w_v, dims=([2], [2]))
        return k.transpose(1, 2), v.movedim(2, 1)


build = Attention
session = carried
