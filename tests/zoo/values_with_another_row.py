"""Value embeddings (as in speed-run GPTs): to the values of each head a second cached row is added, which no latent
makes. Both parts of the sum keep products of their own: that row as it is, the latent before its weight."""

import torch

from tests.zoo.base import Carry, InPart, Usual, rows

EXPECTED = InPart("keys and values", "head_dependent_latent")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.beside = self.random.linear(dims.D, dims.H * dims.V)

    def forward(self, x, c_past, r_past, past):
        d, start = self.dims, c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        beside = torch.cat([past, self.beside(x)], 1)
        k, v = self.expand(c)
        v = v + beside.unflatten(-1, (d.H, d.V)).transpose(1, 2)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c, r, beside


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R, d.H * d.V))
