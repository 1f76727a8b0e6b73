"""Two sparse layers with one indexer: the upper one reads the keys that were chosen for the lower one (LongCat's sparse
attention, GLM-5.2). Legal, twice."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.base import Absorbed, Carry, Usual, causal, rows

EXPECTED = Absorbed(2)
CHOSEN = 3


class Layer(Usual):
    def forward(self, x, index, c_past, r_past):
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        S, T = x.shape[1], c.shape[1]
        seen = torch.zeros(x.shape[0], S, T, dtype=torch.bool).scatter(-1, index, True) & causal(S, T)
        q, k = self.queries(x, c_past.shape[1]), self.join(k, r)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=self.scale)
        return x + self.finish(o), c, r


class Layers(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims
        self.lower, self.upper = Layer(dims), Layer(dims)
        r = self.lower.random
        self.index_q, self.index_k = r.linear(dims.D, 2 * dims.R), r.linear(dims.D, dims.R)
        self.index_weights = r.linear(dims.D, 2)

    def forward(self, x, keys_past, *past):
        keys = torch.cat([keys_past, self.index_k(x)], 1)
        scores = torch.relu(torch.einsum("bshr,btr->bsht", self.index_q(x).unflatten(-1, (2, -1)), keys))
        scores = torch.einsum("bsh,bsht->bst", self.index_weights(x), scores)
        scores = scores.masked_fill(~causal(x.shape[1], keys.shape[1]), -torch.inf)
        index = scores.topk(min(CHOSEN, keys.shape[1]), -1).indices
        x, *lower = self.lower(x, index, *past[:2])
        x, *upper = self.upper(x, index, *past[2:])
        return x, keys, *lower, *upper


build = Layers


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.R, d.L, d.R, d.L, d.R))
