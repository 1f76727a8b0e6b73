"""Multi-head attention with RoPE and a cache of K and V, in a class called MLA. Not MLA: nothing is compressed."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, Layer, NotMla, causal, rope

EXPECTED = NotMla()


class MLA(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q, self.k = r.linear(d.D, d.H * d.N, scale=2.0), r.linear(d.D, d.H * d.N)
        self.v = r.linear(d.D, d.H * d.V)

    def forward(self, x, k_past, v_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(k_past.shape[2], k_past.shape[2] + S)
        q, k = (rope(p(x).view(B, S, d.H, d.N).transpose(1, 2), positions) for p in (self.q, self.k))
        k = torch.cat([k_past, k], 2)
        v = torch.cat([v_past, self.v(x).view(B, S, d.H, d.V).transpose(1, 2)], 2)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(S, k.shape[2]))
        return self.out(o.transpose(1, 2).flatten(2)), k, v


build = MLA


def session(module):
    d = module.dims
    return Carry(module, *(torch.zeros(d.B, d.H, 0, w, dtype=d.dtype) for w in (d.N, d.V)))
