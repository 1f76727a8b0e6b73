"""No softmax: feature maps elu + 1 and a running sum. Not an attention that these passes know; left alone."""

import torch.nn.functional as F

from tests.zoo.base import NoAttention, Usual, carried, causal

EXPECTED = NoAttention()


class Attention(Usual):
    def attend(self, q, k, v):
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * causal(q.shape[2], k.shape[2])
        return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


build = Attention
session = carried
