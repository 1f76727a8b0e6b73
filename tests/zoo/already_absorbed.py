"""Inference code that absorbs by hand: queries go into the latent space by W_k, scores and sums are over the latent
rows, W_v comes afterwards. Nothing is expanded, nothing is left to do; it stays as it is."""

import torch

from tests.zoo.base import Kept, Usual, carried, causal

EXPECTED = Kept("already_absorbed")


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        w_k, w_v = self.up.weight.view(d.H, d.N + d.V, d.L).split([d.N, d.V], 1)
        q_nope, q_rope = self.queries(x, start).split([d.N, d.R], -1)
        q_latent = torch.einsum("bhsn,hnl->bhsl", q_nope, w_k)
        scores = torch.einsum("bhsl,btl->bhst", q_latent, c) + torch.einsum("bhsr,btr->bhst", q_rope, r)
        scores = (scores * self.scale).masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        o = torch.einsum("bhst,btl->bhsl", scores.softmax(-1), c)
        return self.finish(torch.einsum("bhsl,hvl->bhsv", o, w_v)), c, r


build = Attention
session = carried
