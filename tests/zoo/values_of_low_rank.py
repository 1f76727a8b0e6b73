"""Low-rank values beside ordinary rotated keys (Palu): K per head is cached, and the rows that V is made of. A step has
no mask, so nothing but the attention says that both caches are as long. The values alone are absorbed."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, InPart, Layer, causal, rope, rows

EXPECTED = InPart("values", "not_mla")


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.k = r.linear(d.D, d.H * (d.N + d.R))
        self.down = r.linear(d.D, d.L)
        self.up = r.linear(d.L, d.H * d.V)

    def forward(self, x, k_past, c_past):
        d, S = self.dims, x.shape[1]
        positions = torch.arange(k_past.shape[2], k_past.shape[2] + S)
        q, k = (rope(w(x).unflatten(-1, (d.H, -1)).transpose(1, 2), positions) for w in (self.q, self.k))
        k, c = torch.cat([k_past, k], 2), torch.cat([c_past, self.down(x)], 1)
        v = self.up(c).unflatten(-1, (d.H, d.V)).transpose(1, 2)
        mask = causal(S, k.shape[2]) if S > 1 else None
        return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), k, c

    def finish(self, o):
        return self.out(o.transpose(1, 2).flatten(2))


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.N + d.R, heads=d.H), *rows(module, d.L))
