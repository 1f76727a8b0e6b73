"""The reference spelling of DeepSeek's papers: one up-projection with [k|v] per head, the shared rotary key expanded
and joined by cat, a cache of latents and rotated keys that the caller carries. Legal: nothing follows the
up-projection."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope, rows

EXPECTED = Absorbed()


class Attention(Layer):
    def forward(self, x, c_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + S)
        q_nope, q_rope = self.q(x).view(B, S, d.H, d.N + d.R).transpose(1, 2).split([d.N, d.R], -1)
        c, r = self.down(x).split([d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c)], 1)
        r = torch.cat([r_past, rope(r, positions)], 1)
        T = c.shape[1]
        k_nope, v = self.up(c).view(B, T, d.H, d.N + d.V).transpose(1, 2).split([d.N, d.V], -1)
        k = torch.cat([k_nope, r[:, None].expand(-1, d.H, -1, -1)], -1)
        q = torch.cat([q_nope, rope(q_rope, positions)], -1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(S, T))
        return self.out(o.transpose(1, 2).reshape(B, S, -1)), c, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R))
