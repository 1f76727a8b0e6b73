"""A slip in the axis: the scores are normalised over the heads. Numbers must stay what they are: refused."""

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("softmax_axis")


class Attention(Usual):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(dim=1) @ v


build = Attention
session = carried
