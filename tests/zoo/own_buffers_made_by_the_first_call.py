"""The buffers are made where they are first needed, in forward, and thrown away after a session. Legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Buffered, NotCaptured, at_numbers

EXPECTED = Absorbed()
EXPORTED = NotCaptured("k_cache is mutated in the forward method")


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.reset()

    def reset(self):
        self.k_cache = self.v_cache = None

    def forward(self, x, start: int):
        d = self.dims
        B, S, _ = x.shape
        if self.k_cache is None:
            self.k_cache = x.new_zeros(B, d.H, CAPACITY, d.N + d.R)
            self.v_cache = torch.zeros(B, d.H, CAPACITY, d.V, dtype=x.dtype, device=x.device)
        positions = torch.arange(start, start + S)
        q, k, v = self.step(x, positions)
        self.k_cache[:, :, start : start + S] = k
        self.v_cache[:, :, start : start + S] = v
        return self.over(q, self.k_cache[:, :, : start + S], self.v_cache[:, :, : start + S], positions)


build, session = Attention, at_numbers
