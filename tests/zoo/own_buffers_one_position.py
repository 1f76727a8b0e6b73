"""A decode step writes the one new token at its position, ``k[:B, :, at] = ...``, as code does that counts tokens: no
axis of tokens is left in what is written. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty())

    def forward(self, x, start: int):
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        q, k, v = self.step(x, positions)
        if S == 1:
            self.k_cache[:B, :, start], self.v_cache[:B, :, start] = k[:, :, 0], v[:, :, 0]
        else:
            self.k_cache[:B, :, start : start + S], self.v_cache[:B, :, start : start + S] = k, v
        return self.over(q, self.k_cache[:B, :, : start + S], self.v_cache[:B, :, : start + S], positions)


build, session = Attention, at_numbers
