"""The cache is a list to which every call appends its latents; attention runs over the parts joined. Legal; each step
has a list of another length, so that every step compiles anew."""

import torch

from tests.zoo.base import Absorbed, Usual, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, parts):
        start = sum(c.shape[1] for c, _ in parts)
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        parts = [*parts, (self.norm(c), rope(r, torch.arange(start, start + x.shape[1])))]
        c = torch.cat([c for c, _ in parts], 1)
        r = torch.cat([r for _, r in parts], 1)
        k, v = self.expand(c)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), parts


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        self.module, self.cache = module, []

    def __call__(self, x):
        y, self.cache = self.module(x, self.cache)
        return y
