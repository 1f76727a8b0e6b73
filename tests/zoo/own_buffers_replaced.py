"""Functional code: each call assigns copies of its buffers with the new tokens in them, by `slice_scatter`,
`select_scatter` and `index_copy`. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
COMPILED = EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty(dims.B))

    def forward(self, x, start: int):
        end, positions = start + x.shape[1], torch.arange(start, start + x.shape[1])
        q, k, v = self.step(x, positions)
        if x.shape[1] == 1:
            self.k_cache = torch.select_scatter(self.k_cache, k[:, :, 0], 2, start)
        else:
            self.k_cache = torch.slice_scatter(self.k_cache, k, 2, start, end)
        self.v_cache = self.v_cache.index_copy(2, positions, v)
        return self.over(q, self.k_cache[:, :, :end], self.v_cache[:, :, :end], positions)


build, session = Attention, at_numbers
