"""Teaching code: queries are taken into the latent space by hand, a loop writes the scores of one head after another
into a tensor of zeros, one softmax runs over all of them, and a second loop weighs the values of each head. Legal: each
head is an attention over the same rows, whose values are left to absorb."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed(sites=lambda d: d.H)


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d, start = self.dims, c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        (B, S), T = x.shape[:2], c.shape[1]
        w_k, w_v = self.up.weight.view(d.H, d.N + d.V, d.L).split([d.N, d.V], 1)
        q = self.queries(x, start)
        v = (c @ w_v.reshape(d.H * d.V, d.L).T).view(B, T, d.H, d.V).transpose(1, 2)
        scores = torch.zeros(B, d.H, S, T, dtype=x.dtype)
        for h in range(d.H):
            of_latent = q[:, h, :, : d.N] @ w_k[h]
            scores[:, h] = torch.bmm(of_latent, c.transpose(1, 2)) + torch.bmm(q[:, h, :, d.N :], r.transpose(1, 2))
        scores = scores * self.scale
        scores = scores.masked_fill(~causal(S, T).view(1, 1, S, T), float("-inf"))
        p = scores.softmax(-1)
        o = torch.stack([p[:, h] @ v[:, h] for h in range(d.H)], 1)
        return self.finish(o), c, r


build = Attention
session = carried
