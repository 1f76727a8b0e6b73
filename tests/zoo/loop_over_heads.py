"""Teaching code: a Python loop over heads, each with its own weights and a small attention of its own over the shared
latent; results are joined by cat. Legal: H attentions of one head, each of which reads the same rows."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Layer, carried, causal, rope

EXPECTED = Absorbed(sites=lambda d: d.H)


class Head(nn.Module):
    def __init__(self, dims, random):
        super().__init__()
        d = dims
        self.q = random.linear(d.D, d.N + d.R, scale=2.0)
        self.k, self.v = random.linear(d.L, d.N), random.linear(d.L, d.V)
        self.dims = d

    def forward(self, x, c, r, positions):
        q_n, q_r = self.q(x).split([self.dims.N, self.dims.R], -1)
        scores = q_n @ self.k(c).transpose(1, 2) + rope(q_r, positions) @ r.transpose(1, 2)
        scores = scores / (self.dims.N + self.dims.R) ** 0.5
        scores = scores.masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        return scores.softmax(-1) @ self.v(c)


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        self.heads = nn.ModuleList(Head(dims, self.random) for _ in range(dims.H))

    def forward(self, x, c_past, r_past):
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + x.shape[1])
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        c = torch.cat([c_past, self.norm(c)], 1)
        r = torch.cat([r_past, rope(r, positions)], 1)
        return self.out(torch.cat([head(x, c, r, positions) for head in self.heads], -1)), c, r


build = Attention
session = carried
