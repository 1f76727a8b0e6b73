"""Half of the trick: queries are taken into the latent space by hand, but V is still expanded from the whole cache at
every step. Legal; the other half is done for it."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        w_k, w_v = self.up.weight.view(d.H, d.N + d.V, d.L).split([d.N, d.V], 1)
        q_nope, q_rope = self.queries(x, start).split([d.N, d.R], -1)
        scores = torch.einsum("bhsl,btl->bhst", torch.einsum("bhsn,hnl->bhsl", q_nope, w_k), c)
        scores = (scores + q_rope @ r.unsqueeze(1).mT) * self.scale
        scores = scores.masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        v = torch.einsum("btl,hvl->bhtv", c, w_v)
        return self.finish(scores.softmax(-1) @ v), c, r


build = Attention
session = carried
