"""The highest position is read with `item()` to size a table of rotations, after K and V were expanded: the graph with
the softmax rotates keys that come from before the break. Refused: what makes K and V is out of its sight, and the table
is no weight that makes them."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import NotExported, Refused, carried

EXPECTED = Refused("graph_break")
EXPORTED = NotExported("data-dependent")


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        angles = torch.arange(99, dtype=dims.dtype)[:, None] * dims.random().tensor(dims.N + dims.R)
        self.register_buffer("cos", angles.cos())

    def attend(self, q, k, v):
        last = int(torch.arange(k.shape[2]).max().item())
        positions = torch.arange(last + 1)
        return super().attend(q, k * self.cos[positions], v)


build = Attention
session = carried
