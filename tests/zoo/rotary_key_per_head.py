"""Each head has a rotary key of its own, projected from the hidden state and cached per head, beside a shared latent.
Legal for the latent part; the rows would be H*R wider."""

import torch

from tests.zoo.base import Carry, InPart, Usual, rope, rows

EXPECTED = InPart("keys and values", "per_head_rope")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.down = self.random.linear(dims.D, dims.L)
        self.k_rope = self.random.linear(dims.D, dims.H * dims.R)

    def forward(self, x, c_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        start = c_past.shape[1]
        c = torch.cat([c_past, self.norm(self.down(x))], 1)
        r = self.k_rope(x).view(B, S, d.H, d.R).transpose(1, 2)
        r = torch.cat([r_past, rope(r, torch.arange(start, start + S))], 2)
        k, v = self.expand(c)
        return self.finish(self.attend(self.queries(x, start), torch.cat([k, r], -1), v)), c, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L), *rows(module, d.R, heads=d.H))
