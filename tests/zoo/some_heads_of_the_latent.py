"""Most heads read a shared latent; some are ordinary heads with RoPE on their whole keys, cached per head. One softmax
per head, so the heads of the latent are absorbed and the others stay."""

import torch

from tests.zoo.base import Carry, InPart, Usual, rope, rows

EXPECTED = InPart("some heads", "not_mla")
G = 2


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q = r.linear(d.D, (d.H + G) * (d.N + d.R), scale=2.0)
        self.k, self.v = r.linear(d.D, G * (d.N + d.R)), r.linear(d.D, G * d.V)
        self.out = r.linear((d.H + G) * d.V, d.D)

    def forward(self, x, c_past, r_past, k_past, v_past):
        d = self.dims
        B, S, _ = x.shape
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        q = self.q(x).view(B, S, d.H + G, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], torch.arange(start, start + S))], -1)
        own = self.k(x).view(B, S, G, d.N + d.R).transpose(1, 2)
        own_k = torch.cat([k_past, rope(own, torch.arange(start, start + S))], 2)
        own_v = torch.cat([v_past, self.v(x).view(B, S, G, d.V).transpose(1, 2)], 2)
        k, v = torch.cat([self.join(k, r), own_k], 1), torch.cat([v, own_v], 1)
        return self.finish(self.attend(q, k, v)), c, r, own_k, own_v


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R), *rows(module, d.N + d.R, d.V, heads=G))
