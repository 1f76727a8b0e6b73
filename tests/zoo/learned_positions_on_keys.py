"""A learned absolute position embedding is added to the expanded keys. Illegal for K: the sum has another constant at
each position."""

from tests.zoo.base import CAPACITY, InPart, Usual, carried

EXPECTED = InPart("values", "position_dependent")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.positions = self.random.weight(CAPACITY, dims.N + dims.R)

    def attend(self, q, k, v):
        return super().attend(q, k + self.positions[: k.shape[2]], v)


build = Attention
session = carried
