"""gpt-oss sinks: a learned logit per head is joined to the scores, takes its part of the softmax and is cut off.
Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.sinks = self.random.weight(dims.H)

    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        probs = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return probs @ v


build = Attention
session = carried
