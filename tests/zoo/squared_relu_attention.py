"""Weights that are a squared ReLU of the scores, divided by their sum. Legal, and left alone as all attention that has
no softmax."""

import torch

from tests.zoo.base import Refused, Usual, carried, causal

EXPECTED = Refused("not_softmax")
LEGAL = True


class Attention(Usual):
    def attend(self, q, k, v):
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) * self.scale
        weights = scores.relu().square() * causal(q.shape[2], k.shape[2])
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-3)
        return torch.einsum("bhst,bhtv->bhsv", weights, v)


build = Attention
session = carried
