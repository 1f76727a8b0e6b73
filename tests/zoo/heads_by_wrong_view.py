"""A classic slip: `view(B, H, T, N)` without a transpose, which deals pieces of several tokens to each head. The
numbers are wrong and must stay so: refused."""

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("unsupported_op")


class Attention(Usual):
    def expand(self, c):
        d = self.dims
        kv = self.up(c).view(c.shape[0], d.H, c.shape[1], d.N + d.V)
        k, v = kv.split([d.N, d.V], -1)
        return k, v


build = Attention
session = carried
