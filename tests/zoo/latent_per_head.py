"""A compression of their own for all heads, each normed for itself: low-rank MHA, with H latents a token. There are no
rows that heads share: refused."""

import torch

from tests.zoo.base import Carry, Layer, Refused, causal, rows

EXPECTED = Refused("head_dependent_latent")


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q, self.down = r.linear(d.D, d.H * d.N, scale=2.0), r.linear(d.D, d.H * d.L)
        self.w_k, self.w_v = r.weight(d.H, d.L, d.N), r.weight(d.H, d.L, d.V)

    def forward(self, x, c_past):
        d = self.dims
        B, S, _ = x.shape
        c = torch.cat([c_past, self.norm(self.down(x).view(B, S, d.H, d.L)).transpose(1, 2)], 2)
        k, v = c @ self.w_k, c @ self.w_v
        scores = self.q(x).view(B, S, d.H, d.N).transpose(1, 2) @ k.mT / d.N**0.5
        scores = scores.masked_fill(~causal(S, c.shape[2]), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L, heads=module.dims.H))
