"""No position is rotated into queries or keys (NoPE layers, as Kimi Linear has): the latent is all that is cached.
Legal."""

from torch import cat

from tests.zoo.base import Absorbed, Carry, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.q = self.random.linear(dims.D, dims.H * dims.N, scale=2.0)
        self.down = self.random.linear(dims.D, dims.L)

    def forward(self, x, past):
        c = cat([past, self.norm(self.down(x))], 1)
        q = self.q(x).unflatten(-1, (self.dims.H, -1)).transpose(1, 2)
        return self.finish(self.attend(q, *self.expand(c))), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
