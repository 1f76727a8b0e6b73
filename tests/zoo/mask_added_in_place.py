"""Scores changed in place: divided, then `+=` a triangle of minus infinity built with triu. Legal."""

import math

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        S, T = q.shape[2], k.shape[2]
        scores = torch.matmul(q, k.transpose(2, 3))
        scores /= math.sqrt(q.shape[-1])
        scores += torch.triu(torch.full((S, T), float("-inf"), dtype=q.dtype), diagonal=T - S + 1)
        return torch.matmul(scores.softmax(-1), v)


build = Attention
session = carried
