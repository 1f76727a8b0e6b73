"""Weight normalization by hand: the up-projection is g * v / |v|, computed from two Parameters in every call; the
weights lie in a buffer for V. Legal: an expression of weights is a weight."""

import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.direction, self.gain = r.weight(d.H * d.N, d.L), r.weight(d.H * d.N, 1, scale=1.0)
        self.register_buffer("w_v", r.tensor(d.H * d.V, d.L))

    def expand(self, c):
        d = self.dims
        w_k = self.gain * self.direction / self.direction.norm(dim=1, keepdim=True)
        k = F.linear(c, w_k).view(*c.shape[:2], d.H, d.N)
        v = F.linear(c, self.w_v).view(*c.shape[:2], d.H, d.V)
        return k.transpose(1, 2), v.transpose(1, 2)


build = Attention
session = carried
