"""The square root of the scale on queries and keys each, to keep float16 in range. Legal: a constant on the keys."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        half = self.scale**0.5
        scores = (q * half) @ (k * half).transpose(-1, -2)
        return scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf")).softmax(-1) @ v


build = Attention
session = carried
