"""Projections called through functools.partial and bound methods kept in a dict. Legal."""

import functools

import torch.nn.functional as F

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.steps = {"core": functools.partial(F.scaled_dot_product_attention, scale=self.scale, dropout_p=0.0)}

    def expand(self, c):
        project = functools.partial(F.linear, weight=self.up.weight)
        return self.heads(project(c)).split([self.dims.N, self.dims.V], -1)

    def attend(self, q, k, v):
        return self.steps["core"](q, k, v)


build = Attention
session = carried
