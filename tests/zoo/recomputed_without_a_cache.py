"""No cache: each step runs the whole sequence again. Legal, and not worth it: there are as many queries as keys.
(torch.export's graph is of one size, and for that, with sizes as small as here, absorbing is cheaper.)"""

import torch

from tests.zoo.base import Absorbed, Kept, Usual, rows

EXPECTED = Kept("cost_prefill")
EXPORTED = Absorbed()


class Attention(Usual):
    def forward(self, x):
        return super().forward(x, *rows(self, self.dims.L, self.dims.R))[0]


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        d = module.dims
        self.module, self.cache = module, torch.zeros(d.B, 0, d.D, dtype=d.dtype)

    def __call__(self, x):
        self.cache = torch.cat([self.cache, x], 1)
        return self.module(self.cache)[:, -x.shape[1] :]
