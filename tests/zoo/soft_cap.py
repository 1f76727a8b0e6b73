"""Gemma's soft cap: tanh over the scaled scores before the mask. Legal: the products are rewritten one by one and what
is between them stays."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = torch.tanh(q @ k.mT * self.scale / 5.0) * 5.0
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return scores.softmax(-1) @ v


build = Attention
session = carried
