"""A bfloat16 layer with a norm, scores and softmax in float32 and casts around them. Legal."""

import torch

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Dims, carried, causal

EXPECTED = Absorbed()
TOLERANCE = 0.05  # bfloat16


class Attention(LatentLayer):
    def latent(self, c):
        c = c.float()
        return (c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16() * self.norm.weight

    def attend(self, q, k, v):
        scores = (q @ k.mT).float() * self.scale
        scores = scores.masked_fill(~causal(*scores.shape[-2:]), torch.finfo(torch.float32).min)
        return (scores.softmax(-1).bfloat16() @ v).to(q.dtype)


def build(dims):
    return Narrow(dims)


class Narrow(Attention):
    def __init__(self, dims):
        super().__init__(Dims(**{**vars(dims), "dtype": torch.bfloat16}))

    def forward(self, x, c_past, r_past):
        y, c, r = super().forward(x.bfloat16(), c_past, r_past)
        return y.to(x.dtype), c, r


session = carried
