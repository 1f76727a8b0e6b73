"""LongCat's scales: the latent is multiplied by sqrt(D/L) after its norm, queries by sqrt(D/Q); Mistral's queries have
a factor that grows with the position. Legal: a constant on the rows, and any factor on the query side."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def expand(self, c):
        return super().expand(c * (self.dims.D / self.dims.L) ** 0.5)

    def queries(self, x, start):
        positions = torch.arange(start, start + x.shape[1], dtype=x.dtype)
        return super().queries(x, start) * (1.3 + 0.1 * torch.log1p(positions // 4))[:, None]


build = Attention
session = carried
