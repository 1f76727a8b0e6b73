"""`apply_rotary_emb(xq, xk)` of Llama 2 on the expanded keys, complex numbers and heads last. Illegal for K."""

import torch

from tests.zoo.base import CAPACITY, Carry, InPart, Layer, causal, rows

EXPECTED = InPart("values", "position_dependent")


def turn(x, table):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(3)


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.q, self.down = self.random.linear(d.D, d.H * d.N, scale=2.0), self.random.linear(d.D, d.L)
        self.k_up, self.v_up = self.random.linear(d.L, d.H * d.N), self.random.linear(d.L, d.H * d.V)
        angle = torch.arange(CAPACITY, dtype=d.dtype)[:, None] * 0.3 ** torch.arange(d.N // 2, dtype=d.dtype)
        self.register_buffer("freqs", torch.polar(torch.ones_like(angle), angle))

    def forward(self, x, c_past):
        d = self.dims
        B, S, _ = x.shape
        c = torch.cat([c_past, self.norm(self.down(x))], 1)
        T = c.shape[1]
        q = turn(self.q(x).view(B, S, d.H, d.N), self.freqs[T - S : T])
        k = turn(self.k_up(c).view(B, T, d.H, d.N), self.freqs[:T])
        v = self.v_up(c).view(B, T, d.H, d.V)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / d.N**0.5
        scores = scores.masked_fill(~causal(S, T), float("-inf"))
        return self.out((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
