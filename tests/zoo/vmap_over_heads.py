"""torch.func.vmap over the heads of a single-head attention: one program per head, as in JAX code. Legal."""

import torch
from torch import nn

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, NotExported, carried, causal

EXPECTED = Absorbed()
EXPORTED = NotExported("fake tensor")  # torch.export does not know where the fill inside of vmap comes from


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        self.w_k = nn.Parameter(self.random.tensor(dims.H, dims.N, dims.L))
        self.w_v = nn.Parameter(self.random.tensor(dims.H, dims.V, dims.L))

    def forward(self, x, c_past, r_past):
        q, c, r = self.rows(x, c_past, r_past)

        seen = causal(q.shape[-2], c.shape[1])

        def one_head(q, w_k, w_v):
            k = torch.cat([c @ w_k.T, r], -1)
            scores = (q @ k.mT * self.scale).masked_fill(~seen, -torch.inf)
            return scores.softmax(-1) @ (c @ w_v.T)

        o = torch.func.vmap(one_head, in_dims=(1, 0, 0), out_dims=2)(q, self.w_k, self.w_v)
        return self.out(o.flatten(2)), c, r


build = Attention
session = carried
