"""Megatron's core: batch and heads are one axis, scores come from baddbmm with the mask as its first operand. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        B, H, S, _ = q.shape
        T = k.shape[2]
        mask = torch.zeros(S, T, dtype=q.dtype).masked_fill(~causal(S, T), -10000.0).expand(B * H, S, T)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=1.0, alpha=self.scale)
        return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(B, H, S, -1)


build = Attention
session = carried
