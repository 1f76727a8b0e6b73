"""Flash attention as a Python loop: keys in blocks, with a running maximum and a running sum. Legal: each block is a
slice of K and V, and so of the rows that make them; its two products are absorbed, the corrections between the blocks
stay as they are."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed(2)
EXPORTED = Absorbed(3)  # three blocks by then
BLOCK = 3


class Attention(Usual):
    def attend(self, q, k, v):
        keep = causal(q.shape[2], k.shape[2])
        top = q.new_full((*q.shape[:3], 1), -1e30)
        total, o = torch.zeros_like(top), q.new_zeros(*q.shape[:3], v.shape[-1])
        for start in range(0, k.shape[2], BLOCK):
            end = min(start + BLOCK, k.shape[2])
            scores = q @ k[:, :, start:end].mT * self.scale
            scores = scores.masked_fill(~keep[:, start:end], -1e30)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - higher)
            correction = torch.exp(top - higher)
            total = total * correction + weights.sum(-1, keepdim=True)
            o = o * correction + weights @ v[:, :, start:end]
            top = higher
        return o / total


build = Attention
session = carried
