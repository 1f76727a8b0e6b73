"""An attention operator of some library that nobody has told us about. Nothing can be proved of it; it is named."""

import torch

from tests.support import flash
from tests.zoo.base import Refused, Usual, carried

flash.register()

EXPECTED = Refused("unsupported_op")
LEGAL = True


class Attention(Usual):
    def attend(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.ops.house.fast_attn(q, k, v, self.scale).transpose(1, 2)


build = Attention
session = carried
