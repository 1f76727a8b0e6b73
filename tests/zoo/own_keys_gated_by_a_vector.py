"""Each key is an image of the latent, to which a row that all heads share is added, times a learned number for each
column; keys and values stand in buffers. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_numbers, rope

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty(dims.B))
        self.keys = self.random.linear(dims.L, dims.H * (dims.N + dims.R))
        self.row = self.random.linear(dims.D, dims.N + dims.R)
        self.gain = self.random.weight(dims.N + dims.R, scale=1.0)

    def forward(self, x, start: int):
        end, d = start + x.shape[1], self.dims
        positions = torch.arange(start, end)
        q, _, _ = self.step(x, positions)
        c = self.norm(self.down(x)[..., : d.L])
        k = self.keys(c).unflatten(2, (d.H, -1)).transpose(1, 2)
        row = rope(self.row(x), positions)[:, None]
        self.k_cache[:, :, start:end] = torch.addcmul(k * self.gain, row, self.gain)
        self.v_cache[:, :, start:end] = self.expand(c)[1]
        return self.over(q, self.k_cache[:, :, :end], self.v_cache[:, :, :end], positions)


build, session = Attention, at_numbers
