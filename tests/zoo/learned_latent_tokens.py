"""A class of this name in another sense (Perceiver, Set Transformer): learned latent tokens are the queries of a
cross-attention over plain keys and values. No MLA: nothing is compressed.
Refused, and the reason is true of it: the cached K and V are wider than the hidden states they are made of."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, Layer, Refused

EXPECTED = Refused("expanded_cache")


class MultiHeadLatentAttention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.latents = r.weight(1, d.D)
        self.q, self.kv = r.linear(d.D, d.H * d.N, scale=2.0), r.linear(d.D, d.H * (d.N + d.V))

    def forward(self, x, k_past, v_past):
        d = self.dims
        B, S, _ = x.shape
        k, v = self.kv(x).view(B, S, d.H, d.N + d.V).transpose(1, 2).split([d.N, d.V], -1)
        k, v = torch.cat([k_past, k], 2), torch.cat([v_past, v], 2)
        q = self.q(self.latents).view(1, 1, d.H, d.N).transpose(1, 2).expand(B, -1, -1, -1)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2)), k, v


build = MultiHeadLatentAttention


def session(module):
    d = module.dims
    k, v = (torch.zeros(d.B, d.H, 0, w, dtype=d.dtype) for w in (d.N, d.V))
    return Carry(module, k, v)
