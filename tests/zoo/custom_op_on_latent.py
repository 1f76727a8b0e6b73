"""A custom operator makes the rows that are expanded (a fused norm of the cached latents). Legal: the map
starts behind it."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


@torch.library.custom_op("mla_zoo::fused_norm", mutates_args=())
def fused_norm(c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@fused_norm.register_fake
def _(c, weight):
    return torch.empty_like(c)


class Attention(LatentLayer):
    def expand(self, c):
        return super().expand(fused_norm(c, self.norm.weight))


build = Attention
session = carried
