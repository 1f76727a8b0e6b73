"""One buffer of rows [latent|rope] that the caller passes, written by `rows[:, positions] = ...`. Legal."""

import torch
import torch.nn.functional as F

from tests.zoo.base import CAPACITY, Absorbed, Usual, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, cache, positions):
        d = self.dims
        c, r = self.down(x).split([d.L, d.R], -1)
        cache[:, positions] = torch.cat([self.norm(c), rope(r, positions)], -1)
        c, r = cache[..., : d.L], cache[..., d.L :]
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        k, v = self.expand(c)
        keep = torch.arange(cache.shape[1])[None] <= positions[:, None]
        return self.finish(F.scaled_dot_product_attention(q, self.join(k, r), v, attn_mask=keep))


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        d = module.dims
        self.module, self.position = module, 0
        self.cache = torch.zeros(d.B, CAPACITY, d.L + d.R, dtype=d.dtype)

    def __call__(self, x):
        y = self.module(x, self.cache, torch.arange(self.position, self.position + x.shape[1]))
        self.position += x.shape[1]
        return y
