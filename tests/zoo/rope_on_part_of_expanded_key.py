"""GPT-NeoX's partial rotation carried over to MLA: the first columns of each expanded key are turned. Illegal for K."""

import torch

from tests.zoo.base import Carry, InPart, Usual, rope, rows

EXPECTED = InPart("values", "position_dependent")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.q = self.random.linear(dims.D, dims.H * dims.N, scale=2.0)
        self.down = self.random.linear(dims.D, dims.L)

    def forward(self, x, c_past):
        d = self.dims
        start = c_past.shape[1]
        c = torch.cat([c_past, self.norm(self.down(x))], 1)
        k, v = self.expand(c)
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N).transpose(1, 2)
        q = torch.cat([rope(q[..., :2], torch.arange(start, start + x.shape[1])), q[..., 2:]], -1)
        k = torch.cat([rope(k[..., :2], torch.arange(c.shape[1])), k[..., 2:]], -1)
        return self.finish(self.attend(q, k, v)), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
