"""fairseq's layout: [S,B,D], caches [T,B,L], batch and heads merged by `view(-1, B * H, width)`. Legal."""

import torch

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope

EXPECTED = Absorbed()


class Attention(Layer):
    def forward(self, x, c_past, r_past):
        d = self.dims
        x = x.transpose(0, 1)
        S, B, _ = x.shape
        positions = torch.arange(c_past.shape[0], c_past.shape[0] + S)
        c, r = self.down(x).split([d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c)], 0)
        r = torch.cat([r_past, rope(r.transpose(0, 1), positions).transpose(0, 1)], 0)
        T = c.shape[0]
        k, v = self.up(c).view(T, B * d.H, d.N + d.V).transpose(0, 1).split([d.N, d.V], -1)
        q_n, q_r = self.q(x).view(S, B * d.H, d.N + d.R).transpose(0, 1).split([d.N, d.R], -1)
        k_r = r.unsqueeze(2).expand(T, B, d.H, d.R).reshape(T, B * d.H, d.R).transpose(0, 1)
        q, k = torch.cat([q_n, rope(q_r, positions)], -1), torch.cat([k, k_r], -1)
        scores = torch.bmm(q * self.scale, k.transpose(1, 2)).masked_fill(~causal(S, T), float("-inf"))
        o = torch.bmm(torch.softmax(scores, -1), v).transpose(0, 1).reshape(S, B, d.H * d.V)
        return self.out(o).transpose(0, 1), c, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *(torch.zeros(0, d.B, w, dtype=d.dtype) for w in (d.L, d.R)))
