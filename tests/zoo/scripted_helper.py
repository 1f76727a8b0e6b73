"""A helper compiled by torch.jit.script between the latent and the heads. Legal: the trace goes through it."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


@torch.jit.script
def scripted_heads(kv: torch.Tensor, H: int) -> torch.Tensor:
    return kv.unflatten(-1, [H, -1]).transpose(1, 2)


class Attention(LatentLayer):
    def heads(self, kv):
        return scripted_heads(kv, self.dims.H)


build = Attention
session = carried
