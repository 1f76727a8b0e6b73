"""Scores laid out [B,T,H,S] and a softmax over dimension 1: legal like any other order of axes."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = torch.einsum("bhtk,bhsk->bths", k, q).mul(self.scale)
        hidden = causal(q.shape[2], k.shape[2]).logical_not().t()[:, None, :]
        probs = scores.masked_fill(hidden, -torch.inf).softmax(1)
        return torch.einsum("bths,bhtv->bhsv", probs, v)


build = Attention
session = carried
