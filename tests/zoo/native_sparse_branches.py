"""Native sparse attention (arXiv 2502.11089) over latents: each query attends to the means of blocks, to the best
blocks, and to a window, and adds the three up. Legal: a mean of latents is a latent; the best blocks are a list of
keys, and a window is a range."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed(3)
BLOCK, BEST, WINDOW = 2, 2, 4


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.gate = self.random.linear(dims.D, 3)

    def forward(self, x, c_past, r_past):
        c, r = self.append(x, c_past, r_past)
        q = self.queries(x, c_past.shape[1])
        S, T = x.shape[1], c.shape[1]
        ends = torch.arange(BLOCK - 1, T, BLOCK)
        seen = causal(S, T)

        means = [t[:, : len(ends) * BLOCK].unflatten(1, (-1, BLOCK)).mean(2) for t in (c, r)]
        k, v = self.expand(means[0])
        whole = seen[:, ends]
        scores = (q @ self.join(k, means[1]).mT * self.scale).masked_fill(~whole, -torch.inf)
        coarse = scores.softmax(-1).nan_to_num() @ v

        k, v = self.expand(c)
        k = self.join(k, r)
        ranks = F.pad(scores.amax(1), (0, -(-T // BLOCK) - len(ends)), value=torch.inf)  # the newest block always
        best = ranks.topk(min(BEST, ranks.shape[-1]), -1).indices
        blocks = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, best, True)
        listed = blocks.repeat_interleave(BLOCK, -1)[..., :T] & seen
        fine = F.scaled_dot_product_attention(q, k, v, attn_mask=listed[:, None], scale=self.scale)

        near = seen & (torch.arange(T) > torch.arange(T - S, T)[:, None] - WINDOW)
        window = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=self.scale)
        g = self.gate(x).sigmoid().mT[..., None, None].transpose(1, 2)  # [B,S,3,1,1]
        o = sum(g[:, None, :, i, :, 0] * o for i, o in enumerate((coarse, fine, window)))
        return self.finish(o), c, r


build = Attention
session = carried
