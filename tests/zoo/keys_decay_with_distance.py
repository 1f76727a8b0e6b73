"""Retention's decay as a factor of the expanded keys: gamma ** -position per head. Illegal for K."""

import torch

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "position_dependent")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("gamma", 1 - 0.5 ** torch.arange(2, 2 + dims.H, dtype=dims.dtype))

    def attend(self, q, k, v):
        decay = self.gamma[:, None, None] ** torch.arange(k.shape[2] - 1, -1, -1)[:, None]
        return super().attend(q, k * decay, v)


build = Attention
session = carried
