"""Flash-style: the exponentials are multiplied by V first and the result is divided by their sum. Legal: the same
number, since the sum is one number per query."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)


build = Attention
session = carried
