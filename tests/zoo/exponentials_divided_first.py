"""A softmax written out: exponentials of the scores less their maximum, divided by their sum, then times V. Legal."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        weights = (scores - scores.max(-1, keepdim=True).values).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v


build = Attention
session = carried
