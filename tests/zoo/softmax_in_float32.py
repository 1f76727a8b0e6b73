"""Scores are converted to float32 for the softmax and the weights back to the dtype of the values. Legal; in the test's
float64 the conversion is the loss of precision."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()
TOLERANCE = 2e-5


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).float()
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), torch.finfo(torch.float32).min)
        return scores.softmax(dim=-1, dtype=torch.float32).type_as(v) @ v


build = Attention
session = carried
