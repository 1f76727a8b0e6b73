"""Absorbed by hand, with the fused operator: one buffer of rows [latent | rotary key] is keys and values of all heads,
and the columns of the rotary key are cut off what comes out. Nothing is left to do."""

import torch
from torch.nn import functional as F

from tests.zoo.base import CAPACITY, Buffered, Kept, at_numbers, rope

EXPECTED = Kept("already_absorbed")


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("rows", torch.zeros(dims.B + 1, CAPACITY, dims.L + dims.R, dtype=dims.dtype))

    def reset(self):
        self.rows.zero_()

    def forward(self, x, start: int):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        c, r = self.down(x).split([d.L, d.R], -1)
        self.rows[:B, start : start + S] = torch.cat([self.norm(c), rope(r, positions)], -1)
        w_k, w_v = self.up.weight.view(d.H, d.N + d.V, d.L).split([d.N, d.V], 1)
        q_nope, q_rope = self.queries(x, start).split([d.N, d.R], -1)
        q = torch.cat([q_nope @ w_k, q_rope], -1)
        rows = self.rows[:B, None, : start + S].expand(-1, d.H, -1, -1)
        keep = torch.arange(start + S) <= positions[:, None]
        o = F.scaled_dot_product_attention(q, rows, rows, attn_mask=keep, scale=self.scale)
        return self.finish(o[..., : d.L] @ w_v.mT)


build, session = Attention, at_numbers
