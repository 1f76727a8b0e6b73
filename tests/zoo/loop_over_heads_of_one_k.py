"""K and V are expanded for all heads at once, then a loop takes `k[:, h]` and attends head by head; results are
stacked. Legal."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed(sites=lambda d: d.H)


class Attention(Usual):
    def attend(self, q, k, v):
        keep = causal(q.shape[2], k.shape[2])
        heads = [
            F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], attn_mask=keep, scale=self.scale)
            for h in range(q.shape[1])
        ]
        return torch.stack(heads, dim=1)


build = Attention
session = carried
