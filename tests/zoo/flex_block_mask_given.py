"""flex_attention with a block mask that the caller makes once for all layers, here a window of its own for each head,
in blocks of two. Legal."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, NotExported, rows

EXPECTED = Absorbed()
EXPORTED = NotExported("BlockMask")


class Attention(LatentLayer):
    def forward(self, x, c_past, r_past, mask):
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        q = self.queries(x, c_past.shape[1])
        return self.finish(flex_attention(q, self.join(k, r), v, block_mask=mask, scale=self.scale)), c, r


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        self.module, self.cache = module, rows(module, module.dims.L, module.dims.R)

    def __call__(self, x):
        before, count, heads = self.cache[0].shape[1], x.shape[1], self.module.dims.H
        offset = torch.tensor(before)

        def sees(b, h, i, j):
            return (j <= i + offset) & (i + offset - j <= h + 1)

        mask = create_block_mask(sees, None, heads, count, before + count, device="cpu", BLOCK_SIZE=2)
        y, *self.cache = self.module(x, *self.cache, mask)
        return y
