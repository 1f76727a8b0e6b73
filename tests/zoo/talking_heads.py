"""Talking heads: the scores of all heads are mixed by a small matrix before the softmax. A linear map over heads is no
part of the plain formula: refused."""

import torch

from tests.zoo.base import Refused, Usual, carried, causal

EXPECTED = Refused("unsupported_op")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.mix = self.random.weight(dims.H, dims.H)

    def attend(self, q, k, v):
        scores = torch.einsum("bhst,gh->bgst", q @ k.mT * self.scale, self.mix)
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return scores.softmax(-1) @ v


build = Attention
session = carried
