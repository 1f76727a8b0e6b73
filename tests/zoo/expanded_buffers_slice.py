"""DeepSeek's `naive` branch: buffers of K and V per head, written by a slice and read up to the end."""

import torch

from tests.zoo.base import CAPACITY, EXPANDED_CACHE, Absorbed, Layer, rope

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.register_buffer("k_cache", torch.zeros(d.B, CAPACITY, d.H, d.N + d.R, dtype=d.dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(d.B, CAPACITY, d.H, d.V, dtype=d.dtype), persistent=False)

    def forward(self, x, start_pos: int):
        d = self.dims
        B, S, _ = x.shape
        end, positions = start_pos + S, torch.arange(start_pos, start_pos + S)
        q_n, q_r = self.q(x).view(B, S, d.H, d.N + d.R).split([d.N, d.R], -1)
        q = torch.cat([q_n, rope(q_r.transpose(1, 2), positions).transpose(1, 2)], -1)
        c, r = self.down(x).split([d.L, d.R], -1)
        k, v = self.up(self.norm(c)).view(B, S, d.H, d.N + d.V).split([d.N, d.V], -1)
        k = torch.cat([k, rope(r, positions).unsqueeze(2).expand(-1, -1, d.H, -1)], -1)
        self.k_cache[:B, start_pos:end], self.v_cache[:B, start_pos:end] = k, v
        scores = torch.einsum("bshd,bthd->bsht", q, self.k_cache[:B, :end]) * self.scale
        if S > 1:
            scores += torch.full((S, end), float("-inf"), dtype=x.dtype).triu(end - S + 1).unsqueeze(1)
        return self.out(torch.einsum("bsht,bthd->bshd", scores.softmax(-1), self.v_cache[:B, :end]).flatten(2))


build = Attention


def session(module):
    module.k_cache.zero_()
    module.v_cache.zero_()
    start = 0

    def step(x):
        nonlocal start
        y = module(x, start)
        start += x.shape[1]
        return y

    return step
