"""A static cache of K and V per head, heads first, written by index_copy_ at tensor positions."""

import torch
import torch.nn.functional as F

from tests.zoo.base import CAPACITY, EXPANDED_CACHE, Absorbed, Usual, rope

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.register_buffer("k_cache", torch.zeros(d.B, d.H, CAPACITY, d.N + d.R, dtype=d.dtype))
        self.register_buffer("v_cache", torch.zeros(d.B, d.H, CAPACITY, d.V, dtype=d.dtype))

    def forward(self, x, positions):
        d = self.dims
        c, r = self.down(x).split([d.L, d.R], -1)
        k, v = self.expand(self.norm(c))
        k = self.k_cache.index_copy_(2, positions, self.join(k, rope(r, positions)))
        v = self.v_cache.index_copy_(2, positions, v)
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        keep = torch.arange(CAPACITY) <= positions[:, None]
        return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=keep))


build = Attention


def session(module):
    module.k_cache.zero_()
    module.v_cache.zero_()
    position = 0

    def step(x):
        nonlocal position
        y = module(x, torch.arange(position, position + x.shape[1]))
        position += x.shape[1]
        return y

    return step
