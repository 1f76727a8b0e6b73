"""One buffer [2,...] holds K and V, the values padded to the width of the keys, each written through a selection.
Legal."""

import torch
import torch.nn.functional as F

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("kv", torch.stack([self.empty()[0]] * 2))

    def reset(self):
        self.kv.zero_()

    def forward(self, x, start: int):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        q, k, v = self.step(x, positions)
        self.kv[0, :B, :, start : start + S] = k
        self.kv[1, :B, :, start : start + S] = F.pad(v, (0, d.N + d.R - d.V))
        k, v = self.kv[:, :B, :, : start + S].unbind()
        return self.over(q, k, v[..., : d.V], positions)


build, session = Attention, at_numbers
