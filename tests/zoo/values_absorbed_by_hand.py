"""The other half: K is expanded, but the weights sum the latent rows and W_v is applied to the sum. Legal;
K follows."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        w_k, w_v = self.up.weight.view(d.H, d.N + d.V, d.L).split([d.N, d.V], 1)
        k = torch.einsum("btl,hnl->bhtn", c, w_k)
        scores = self.queries(x, start) @ self.join(k, r).mT * self.scale
        scores = scores.masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        o = scores.softmax(-1) @ c.unsqueeze(1)
        return self.finish(torch.einsum("bhsl,hvl->bhsv", o, w_v)), c, r


build = Attention
session = carried
