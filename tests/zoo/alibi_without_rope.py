"""No rotary key at all; distances come in as a bias per head (ALiBi) that is added to the scores. Legal: the mask does
not depend on the keys."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, causal, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.q = self.random.linear(dims.D, dims.H * dims.N, scale=2.0)
        self.down = self.random.linear(dims.D, dims.L)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, dims.H + 1, dtype=dims.dtype))

    def forward(self, x, c_past):
        d = self.dims
        B, S, _ = x.shape
        c = torch.cat([c_past, self.norm(self.down(x))], 1)
        T = c.shape[1]
        k, v = self.expand(c)
        q = self.q(x).view(B, S, d.H, d.N).transpose(1, 2)
        distance = torch.arange(T)[None] - torch.arange(T - S, T)[:, None]
        bias = self.slopes[:, None, None] * distance
        scores = q @ k.transpose(2, 3) / d.N**0.5 + bias
        scores = scores.masked_fill(~causal(S, T), float("-inf"))
        return self.finish(scores.softmax(dim=-1) @ v), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
