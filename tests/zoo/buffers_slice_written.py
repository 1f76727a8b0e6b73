"""DeepSeek's own inference code, and the teaching repositories after it: caches are preallocated buffers, written by a
slice at ``start_pos`` and read up to the end; the position is a Python int that the caller passes. Legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Layer, rope

EXPECTED = Absorbed()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("c_cache", torch.zeros(dims.B, CAPACITY, dims.L, dtype=dims.dtype), persistent=False)
        self.register_buffer("r_cache", torch.zeros(dims.B, CAPACITY, dims.R, dtype=dims.dtype), persistent=False)

    def forward(self, x, start_pos: int):
        d = self.dims
        B, S, _ = x.shape
        end = start_pos + S
        positions = torch.arange(start_pos, end)
        q_nope, q_rope = self.q(x).view(B, S, d.H, d.N + d.R).split([d.N, d.R], -1)
        q = torch.cat([q_nope, rope(q_rope.transpose(1, 2), positions).transpose(1, 2)], -1)
        c, r = self.down(x).split([d.L, d.R], -1)
        self.c_cache[:B, start_pos:end] = self.norm(c)
        self.r_cache[:B, start_pos:end] = rope(r, positions)
        kv = self.up(self.c_cache[:B, :end]).view(B, end, d.H, d.N + d.V)
        k_nope, v = kv.split([d.N, d.V], -1)
        k = torch.cat([k_nope, self.r_cache[:B, :end].unsqueeze(2).expand(-1, -1, d.H, -1)], -1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.scale
        if S > 1:
            scores += torch.full((S, end), float("-inf"), dtype=x.dtype).triu(end - S + 1).unsqueeze(1)
        o = torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v)
        return self.out(o.flatten(2))


build = Attention


def session(module):
    module.c_cache.zero_()
    module.r_cache.zero_()
    start = 0

    def step(x):
        nonlocal start
        y = module(x, start)
        start += x.shape[1]
        return y

    return step
