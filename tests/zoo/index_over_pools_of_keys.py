"""GLM-5.3-Flash's sparse attention: an indexer scores one mean, weighed by a gate, of every few keys, and a query sees
all tokens of the best of these pools and of the last one, which may be incomplete. Legal: entries of the list that
stand for no key are written behind the last one."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Carry, Usual, causal, rows

EXPECTED = Absorbed()
POOL, BEST = 2, 2


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.index_q, self.index_k = r.linear(d.D, 2 * d.R), r.linear(d.D, d.R)
        self.index_gate, self.index_weights = r.linear(d.D, d.R), r.linear(d.D, 2)

    def forward(self, x, c_past, r_past, keys_past):
        c, r = self.append(x, c_past, r_past)
        keys = torch.cat([keys_past, torch.cat([self.index_k(x), self.index_gate(x)], -1)], 1)
        k, v = self.expand(c)
        S, T = x.shape[1], c.shape[1]
        listed = self.chosen(x, keys, S, T)
        seen = torch.zeros(x.shape[0], S, T + 1, dtype=torch.bool).scatter(-1, listed, True)[..., :T]
        q = self.queries(x, c_past.shape[1])
        mask = (seen & causal(S, T))[:, None]
        o = F.scaled_dot_product_attention(q, self.join(k, r), v, attn_mask=mask, scale=self.scale)
        return self.finish(o), c, r, keys

    def chosen(self, x, keys, S, T):
        """[B,S,k]: the tokens of the best pools, and the newest ones; T for none."""
        pools = T // POOL
        key, gate = keys[:, : pools * POOL].unflatten(1, (pools, POOL)).chunk(2, -1)
        key = (gate.softmax(2) * key).sum(2)
        q = self.index_q(x).unflatten(-1, (2, -1))
        scores = torch.relu(torch.einsum("bshr,bpr->bshp", q, key)) * self.dims.R**-0.5
        scores = torch.einsum("bsh,bshp->bsp", self.index_weights(x), scores)
        ends = torch.arange(POOL - 1, pools * POOL, POOL)
        position = torch.arange(T - S, T)[:, None]
        scores = scores.masked_fill(ends > position, -1e30)
        best = scores.topk(min(BEST, pools), -1).indices
        tokens = (best[..., None] * POOL + torch.arange(POOL)).flatten(-2)
        tokens = torch.where(tokens > position, T, tokens)
        newest = (position + 1) // POOL * POOL + torch.arange(POOL - 1)
        newest = torch.where(newest > position, T, newest)
        return torch.cat([tokens, newest.expand(x.shape[0], -1, -1)], -1)


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R, 2 * d.R))
