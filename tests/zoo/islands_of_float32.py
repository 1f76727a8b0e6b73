"""A bfloat16 layer with a norm, scores and softmax in float32 and casts around them. Legal."""

import torch

from tests.support.latent_layer import InPrecision
from tests.zoo.base import Absorbed, carried, causal

EXPECTED = Absorbed()
TOLERANCE = 0.05  # bfloat16


class Attention(InPrecision):
    dtype = torch.bfloat16

    def expand(self, c):
        c = c.float()
        return super().expand((c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16())

    def attend(self, q, k, v):
        scores = (q @ k.mT).float() * self.scale
        scores = scores.masked_fill(~causal(*scores.shape[-2:]), torch.finfo(torch.float32).min)
        return (scores.softmax(-1).bfloat16() @ v).to(q.dtype)


build = Attention
session = carried
