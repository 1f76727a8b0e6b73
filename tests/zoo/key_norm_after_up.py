"""QK-norm per head, applied to the expanded keys. Illegal for K: each key is divided by its own length."""

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "nonlinear")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.k_norm = self.random.norm(dims.N)

    def join(self, k, r):
        return super().join(self.k_norm(k), r)


build = Attention
session = carried
