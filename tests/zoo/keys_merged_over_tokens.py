"""Token merging: the expanded keys and values of two neighbours are averaged before the attention. Illegal."""

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("token_mixing")


class Attention(Usual):
    def attend(self, q, k, v):
        k, v = (t[:, :, : t.shape[2] // 2 * 2].unflatten(2, (-1, 2)).mean(3) for t in (k, v))
        return (q @ k.mT * self.scale).softmax(-1) @ v


build = Attention
session = carried
