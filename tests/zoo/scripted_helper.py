"""A helper compiled by torch.jit.script between the latent and the heads. Dynamo breaks the graph at the call."""

import torch

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Refused, carried

EXPECTED = Refused("graph_break")
EXPORTED = Absorbed()


@torch.jit.script
def scripted_heads(kv: torch.Tensor, H: int) -> torch.Tensor:
    return kv.unflatten(-1, [H, -1]).transpose(1, 2)


class Attention(LatentLayer):
    def heads(self, kv):
        return scripted_heads(kv, self.dims.H)


build = Attention
session = carried
