"""transformers' DeepSeek: pairs are deinterleaved by view and transpose, then `rotate_half` with cos and sin tables
that a module of its own computes from position ids. On the shared key only: legal."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Rotary(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100.0 ** (torch.arange(0, width, 2, dtype=dtype) / width)))

    def forward(self, position_ids):
        freqs = (self.inv_freq[None, :, None] @ position_ids[:, None, :].to(self.inv_freq.dtype)).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply(x, cos, sin):
    b, h, s, w = x.shape
    x = x.view(b, h, s, w // 2, 2).transpose(4, 3).reshape(b, h, s, w)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.rotary = Rotary(dims.R, dims.dtype)

    def tables(self, x, start):
        return self.rotary(torch.arange(start, start + x.shape[1]).unsqueeze(0))

    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        r = apply(r.unsqueeze(1), *self.tables(x, c_past.shape[1])).squeeze(1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        return torch.cat([q[..., : d.N], apply(q[..., d.N :], *self.tables(x, start))], -1)


build = Attention
session = carried
