"""Weights as raw Parameters [in, out] and `x @ W`, with no nn.Linear anywhere; a bias on both up-projections. Legal:
the bias of K is the same for all keys of a query and leaves the softmax, that of V comes back once."""

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.w_k, self.b_k = r.weight(d.L, d.H * d.N, scale=0.4), r.weight(d.H * d.N)
        self.w_v, self.b_v = r.weight(d.L, d.H * d.V, scale=0.4), r.weight(d.H * d.V)

    def expand(self, c):
        d = self.dims
        B, T, _ = c.shape
        k = (c @ self.w_k + self.b_k).view(B, T, d.H, d.N).permute(0, 2, 1, 3)
        v = (c @ self.w_v + self.b_v).view(B, T, d.H, d.V).permute(0, 2, 1, 3)
        return k, v


build = Attention
session = carried
