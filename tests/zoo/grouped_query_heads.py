"""The up-projection makes half as many K and V heads as there are query heads; `repeat_kv` copies them. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, rope

EXPECTED = Absorbed()


def repeat_kv(x, n):
    B, H, T, W = x.shape
    return x[:, :, None, :, :].expand(B, H, n, T, W).reshape(B, H * n, T, W)


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, 2 * d.H * (d.N + d.R), scale=2.0)
        self.out = r.linear(2 * d.H * d.V, d.D)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], -1, 2 * d.H, d.N + d.R).transpose(1, 2)
        return torch.cat([q[..., : d.N], rope(q[..., d.N :], torch.arange(start, start + x.shape[1]))], -1)

    def attend(self, q, k, v):
        return super().attend(q, repeat_kv(k, 2), repeat_kv(v, 2))


build = Attention
session = carried
