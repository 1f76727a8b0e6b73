"""Grouped-query attention to the best blocks of keys and to the newest tokens (MiniMax-M3, Qwen4's QSA). Not MLA: K and
V of the group are cached as they are, whatever is chosen of them."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, Layer, NotMla, causal, rope, rows

EXPECTED = NotMla()
BLOCK, BEST = 2, 2


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.q, self.k, self.v = r.linear(d.D, d.H * d.N, scale=2.0), r.linear(d.D, d.N), r.linear(d.D, d.V)
        self.index_q, self.index_k = r.linear(d.D, d.R), r.linear(d.D, d.R)

    def forward(self, x, k_past, v_past, index_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(k_past.shape[1], k_past.shape[1] + S)
        q = rope(self.q(x).view(B, S, d.H, d.N).transpose(1, 2), positions)
        k = torch.cat([k_past, rope(self.k(x), positions)], 1)
        v = torch.cat([v_past, self.v(x)], 1)
        index = torch.cat([index_past, self.index_k(x)], 1)
        mask = self.seen(self.index_q(x) @ index.mT)
        keys, values = (t[:, None].expand(-1, d.H, -1, -1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None])
        return self.out(o.transpose(1, 2).flatten(2)), k, v, index

    def seen(self, scores):
        """[B,S,T]: tokens of the blocks of which one scores best, and of the newest block."""
        S, T = scores.shape[1:]
        seen = causal(S, T)
        blocks = -(-T // BLOCK)
        scores = F.pad(scores.masked_fill(~seen, -torch.inf), (0, blocks * BLOCK - T), value=-torch.inf)
        scores = scores.unflatten(-1, (blocks, BLOCK)).amax(-1)
        newest = (torch.arange(T - S, T) // BLOCK)[None, :, None].expand(scores.shape[0], -1, -1)
        best = scores.scatter(-1, newest, torch.inf).topk(min(BEST, blocks), -1).indices
        listed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        return listed.repeat_interleave(BLOCK, -1)[..., :T] & seen


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.N, d.V, d.R))
