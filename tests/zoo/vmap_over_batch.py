"""torch.func.vmap over the batch of an attention of one sequence. Legal."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried, causal

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def forward(self, x, c_past, r_past):
        q, c, r = self.rows(x, c_past, r_past)
        d = self.dims

        def one_sequence(q, c, r):
            k, v = self.up(c).unflatten(-1, (d.H, -1)).transpose(0, 1).split([d.N, d.V], -1)
            k = torch.cat([k, r.expand(d.H, -1, -1)], -1)
            scores = torch.einsum("hsk,htk->hst", q, k) * self.scale
            scores = scores.masked_fill(~causal(*scores.shape[-2:]), -torch.inf)
            return torch.einsum("hst,htv->shv", scores.softmax(-1), v)

        return self.out(torch.func.vmap(one_sequence)(q, c, r).flatten(2)), c, r


build = Attention
session = carried
