"""Each sequence is written at positions of its own, by a pair of index tensors. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_positions

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*(cache.transpose(1, 2).contiguous() for cache in self.empty()))

    def forward(self, x, positions):
        B = x.shape[0]
        q, k, v = self.step(x, positions)
        at = torch.arange(B)[:, None], positions[None].expand(B, -1)
        self.k_cache[at], self.v_cache[at] = k.transpose(1, 2), v.transpose(1, 2)
        return self.over(q, self.k_cache[:B].transpose(1, 2), self.v_cache[:B].transpose(1, 2), positions)


build, session = Attention, at_positions
