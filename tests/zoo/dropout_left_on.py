"""Dropout on the weights that is always on (F.dropout without `training=`), seeded by the step. Refused: which weights
are dropped belongs to the expanded form's random numbers."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Carry, Refused, Usual, causal, rows

EXPECTED = Refused("dropout")


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return F.dropout(scores.softmax(-1), 0.3) @ v


build = Attention


def session(module):
    carry = Carry(module, *rows(module, module.dims.L, module.dims.R))

    def step(x):
        torch.manual_seed(int(carry.cache[0].shape[1]))
        return carry(x)

    return step
