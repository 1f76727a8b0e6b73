"""A graph break between the product of queries and keys and the softmax (the shape of the scores is printed, say): the
graph with the softmax has neither queries nor keys. Refused; torch.export sees no break."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Refused, carried, causal

EXPECTED = Refused("graph_break")
EXPORTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        torch._dynamo.graph_break()
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return scores.softmax(-1) @ v


build = Attention
session = carried
