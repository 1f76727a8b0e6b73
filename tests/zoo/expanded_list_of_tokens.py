"""The layer appends each token's K and V, per head and partly rotated, to Python lists and joins them in every step.
Legal; each step has lists of another length, so that every step compiles anew."""

import torch

from tests.zoo.base import Absorbed, Buffered, NotExported, at_numbers

EXPECTED = Absorbed()
EXPORTED = NotExported("were assigned during export")


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.reset()

    def reset(self):
        self.keys, self.values = [], []

    def forward(self, x, start: int):
        positions = torch.arange(start, start + x.shape[1])
        q, k, v = self.step(x, positions)
        self.keys.append(k)
        self.values.append(v)
        return self.over(q, torch.cat(self.keys, 2), torch.cat(self.values, 2), positions)


build, session = Attention, at_numbers
