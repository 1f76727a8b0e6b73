"""A loop makes the whole key of every head, `cat([c @ w[h], r])`, and the values; both lists are stacked. Legal: the
rotary key is the same rows again for each head."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d, start = self.dims, c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        per_head = self.up.weight.view(d.H, d.N + d.V, d.L)
        k = torch.stack([torch.cat([c @ w[: d.N].T, r], -1) for w in per_head], 1)
        v = torch.stack([c @ w[d.N :].T for w in per_head], 2).transpose(1, 2)
        return self.finish(self.attend(self.queries(x, start), k, v)), c, r


build = Attention
session = carried
