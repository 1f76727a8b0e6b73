"""One buffer holds K and V side by side, and they are split when they are read. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("kv", torch.cat(self.empty(), -1))

    def reset(self):
        self.kv.zero_()

    def forward(self, x, start: int):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        q, k, v = self.step(x, positions)
        self.kv[:B, :, start : start + S] = torch.cat([k, v], -1)
        k, v = self.kv[:B, :, : start + S].split([d.N + d.R, d.V], -1)
        return self.over(q, k, v, positions)


build, session = Attention, at_numbers
