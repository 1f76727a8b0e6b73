"""Weights that are a sigmoid of the scores plus a bias per head, each key by itself. Absorbing asks nothing of the
weights, but only softmax attention is absorbed; it has to be said."""

import torch
from torch import nn

from tests.zoo.base import Refused, Usual, carried, causal

EXPECTED = Refused("not_softmax")
LEGAL = True


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.bias = nn.Parameter(torch.linspace(-2, 0, dims.H, dtype=dims.dtype)[:, None, None])

    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale + self.bias).sigmoid()
        return weights.masked_fill(~causal(q.shape[2], k.shape[2]), 0.0) @ v


build = Attention
session = carried
