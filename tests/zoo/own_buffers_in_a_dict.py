"""The buffers are plain tensors in a dict of lists; narrow and copy_ write them. Legal."""

import torch

from tests.zoo.base import Absorbed, Buffered, NotCaptured, at_numbers

EXPECTED = Absorbed()
EXPORTED = NotCaptured("is mutated in the forward method")


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.caches = {"self": list(self.empty())}

    def reset(self):
        for cache in self.caches["self"]:
            cache.zero_()

    def forward(self, x, start: int):
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        q, *new = self.step(x, positions)
        for cache, rows in zip(self.caches["self"], new, strict=True):
            cache.narrow(0, 0, B).narrow(2, start, S).copy_(rows)
        k, v = (cache.narrow(0, 0, B).narrow(2, 0, start + S) for cache in self.caches["self"])
        return self.over(q, k, v, positions)


build, session = Attention, at_numbers
