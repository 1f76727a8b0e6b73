"""Code that follows Llama's attention and compresses K and V first: RoPE turns the whole K after the up-projection.
Illegal for K: the matrix between query and latent would depend on their distance."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, InPart, Layer, causal, rope, rows

EXPECTED = InPart("values", "position_dependent")


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.q = self.random.linear(d.D, d.H * d.N, scale=2.0)
        self.down = self.random.linear(d.D, d.L)

    def forward(self, x, c_past):
        d = self.dims
        B, S, _ = x.shape
        c = torch.cat([c_past, self.norm(self.down(x))], 1)
        T = c.shape[1]
        q = self.q(x).view(B, S, d.H, d.N).transpose(1, 2)
        k, v = self.up(c).view(B, T, d.H, d.N + d.V).transpose(1, 2).split([d.N, d.V], -1)
        q, k = rope(q, torch.arange(T - S, T)), rope(k, torch.arange(T))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(S, T))
        return self.out(o.transpose(1, 2).reshape(B, S, -1)), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
