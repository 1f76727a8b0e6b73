"""RWKV's token shift on the expanded keys: each is mixed with the one before. A key is an image of two rows: its latent
and the latent before it, which the shifted latents have at its place."""

import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def expand(self, c):
        k, v = super().expand(c)
        return 0.7 * k + 0.3 * F.pad(k, (0, 0, 1, 0))[:, :, :-1], v


build = Attention
session = carried
