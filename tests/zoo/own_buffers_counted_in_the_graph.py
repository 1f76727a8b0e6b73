"""The layer counts its tokens in a buffer, which is written to with K and V. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty(dims.B))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def reset(self):
        for buffer in (self.k_cache, self.v_cache, self.count):
            buffer.fill_(0)

    def forward(self, x, start: int):
        positions = self.count + torch.arange(x.shape[1])
        q, k, v = self.step(x, positions)
        self.k_cache[:, :, positions], self.v_cache[:, :, positions] = k, v
        self.count += x.shape[1]
        return self.over(q, self.k_cache, self.v_cache, positions)


build, session = Attention, at_numbers
