"""RoPE over even and odd columns by strided slices and stack, re-applied at every step to the whole history: what is
cached is the raw rotary key. Legal: it stays one row per token that all heads share."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


def turn(x, start):
    angle = torch.arange(start, start + x.shape[-2])[:, None] * 0.4 ** torch.arange(x.shape[-1] // 2, dtype=x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1).flatten(-2)


class Attention(Usual):
    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def join(self, k, r):
        r = turn(r, 0).unsqueeze(1)
        return torch.cat([k, r.expand_as(k[..., :1].expand(-1, -1, -1, self.dims.R))], -1)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).unflatten(-1, (d.H, d.N + d.R)).transpose(1, 2)
        return torch.cat([q[..., : d.N], turn(q[..., d.N :], start)], -1)


build = Attention
session = carried
