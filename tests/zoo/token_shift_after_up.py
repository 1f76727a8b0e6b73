"""RWKV's token shift on the expanded keys: each is mixed with the one before. Illegal for K: a key is no image of one
row."""

import torch.nn.functional as F

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "too_many_sources")


class Attention(Usual):
    def expand(self, c):
        k, v = super().expand(c)
        return 0.7 * k + 0.3 * F.pad(k, (0, 0, 1, 0))[:, :, :-1], v


build = Attention
session = carried
