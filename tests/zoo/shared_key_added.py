"""A rotated key that all heads share is added to the up-projected keys instead of being joined to them. A key is a
fixed image of both rows: q (W c + r) = (W^T q) c + q r."""

from tests.zoo.base import Absorbed, Dims, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(Dims(**{**vars(dims), "N": dims.R, "R": dims.R}))
        self.q = self.random.linear(dims.D, dims.H * dims.R, scale=2.0)

    def queries(self, x, start):
        return self.q(x).unflatten(-1, (self.dims.H, -1)).transpose(1, 2)

    def join(self, k, r):
        return k + r[:, None]


build = Attention
session = carried
