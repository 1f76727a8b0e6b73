"""Another slip: normalised over the queries, which with one query makes every weight 1. Refused."""

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("softmax_axis")


class Attention(Usual):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(dim=-2) @ v


build = Attention
session = carried
