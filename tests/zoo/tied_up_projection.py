"""One up-projection serves K and V (K = V without the rotary part), to save weights. Legal."""

import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.up = self.random.linear(dims.L, dims.H * dims.N)
        self.out = self.random.linear(dims.H * dims.N, dims.D)

    def expand(self, c):
        k = self.up(c).view(c.shape[0], -1, self.dims.H, self.dims.N).transpose(1, 2)
        return k, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[2], k.shape[2])).contiguous()


build = Attention
session = carried
