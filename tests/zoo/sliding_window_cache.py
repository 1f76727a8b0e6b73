"""Only the newest tokens stay in the cache: cat, then the last W rows. Legal."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, causal, rope, rows

EXPECTED = Absorbed()
WINDOW = 7


class Attention(Usual):
    def forward(self, x, c_past, r_past, seen):
        positions = seen + torch.arange(x.shape[1])
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        c = torch.cat([c_past, self.norm(c)], 1)
        r = torch.cat([r_past, rope(r, positions)], 1)
        q = self.q(x).view(x.shape[0], x.shape[1], self.dims.H, -1).transpose(1, 2)
        q = torch.cat([q[..., : self.dims.N], rope(q[..., self.dims.N :], positions)], -1)
        k, v = self.expand(c)
        scores = q @ self.join(k, r).mT * self.scale
        scores = scores.masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        return self.finish(scores.softmax(-1) @ v), c[:, -WINDOW:], r[:, -WINDOW:], seen + x.shape[1]


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R), torch.tensor(0))
