"""Queries are taken into the latent space by hand and the latent is cached, but the values are expanded when they are
written, into a buffer per head. Legal for the values, whose rows are the latent's."""

import torch
from torch.nn import functional as F

from tests.zoo.base import CAPACITY, EXPANDED_CACHE, Absorbed, Buffered, at_numbers, rope

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        _, v = self.empty()
        self.register_buffer("rows", torch.zeros(dims.B, CAPACITY, dims.L + dims.R, dtype=dims.dtype))
        self.register_buffer("v_cache", v)

    def reset(self):
        self.rows.zero_()
        self.v_cache.zero_()

    def forward(self, x, start: int):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        c, r = self.down(x).split([d.L, d.R], -1)
        c = self.norm(c)
        self.rows[:, start : start + S] = torch.cat([c, rope(r, positions)], -1)
        self.v_cache[:B, :, start : start + S] = self.expand(c)[1]
        q = self.queries(x, start)
        w_k = self.up.weight.view(d.H, d.N + d.V, d.L)[:, : d.N]
        q = torch.cat([torch.einsum("bhsn,hnl->bhsl", q[..., : d.N], w_k), q[..., d.N :]], -1)
        rows, v = self.rows[:, None, : start + S], self.v_cache[:B, :, : start + S]
        keep = torch.arange(start + S) <= positions[:, None]
        o = F.scaled_dot_product_attention(q, rows.expand(-1, d.H, -1, -1), v, attn_mask=keep, scale=self.scale)
        return self.finish(o)


build, session = Attention, at_numbers
