"""Grouped-query attention: one head of K and V for all queries, cached and repeated. Not MLA: nothing is expanded by
weights."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, Layer, NotMla, causal, rope, rows

EXPECTED = NotMla()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q, self.k, self.v = r.linear(d.D, d.H * d.N, scale=2.0), r.linear(d.D, d.N), r.linear(d.D, d.V)

    def forward(self, x, k_past, v_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(k_past.shape[1], k_past.shape[1] + S)
        q = rope(self.q(x).view(B, S, d.H, d.N).transpose(1, 2), positions)
        k = torch.cat([k_past, rope(self.k(x), positions)], 1)
        v = torch.cat([v_past, self.v(x)], 1)
        keys, values = (t[:, None].expand(-1, d.H, -1, -1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal(S, k.shape[1]))
        return self.out(o.transpose(1, 2).flatten(2)), k, v


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.N, module.dims.V))
