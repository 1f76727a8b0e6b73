"""`softmax1`: exp / (1 + sum exp), a sink of logit zero written out. Legal."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        weights = (scores - top).exp()
        return weights / (weights.sum(-1, keepdim=True) + (-top).exp()) @ v


build = Attention
session = carried
