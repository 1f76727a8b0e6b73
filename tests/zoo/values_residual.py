"""Value residual (as in speed-run GPTs and its followers): the values are mixed with those of the first layer, which
another weight makes of a latent of their own. The output mixes what is attended of both latents."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.first_down, self.first_up = self.random.linear(dims.D, 3), self.random.linear(3, dims.H * dims.V)
        self.mix = self.random.weight(1)

    def forward(self, x, c_past, r_past, past):
        d, start = self.dims, c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        first = torch.cat([past, self.first_down(x)], 1)
        k, v = self.expand(c)
        v = self.mix * v + (1 - self.mix) * self.first_up(first).unflatten(-1, (d.H, d.V)).transpose(1, 2)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c, r, first


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R, 3))
