"""FlashAttention over keys that are rotated after the up-projection. K stays, and V is absorbed alone, without the
operator."""

import torch

from tests.support import flash
from tests.zoo.base import InPart, Usual, carried, rope

flash.register()

EXPECTED = InPart("values", "position_dependent")


class Attention(Usual):
    def attend(self, q, k, v):
        T = k.shape[2]
        k = torch.cat([rope(k[..., :4], torch.arange(T)), k[..., 4:]], -1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash.flash_attn_func(q, k, v, softmax_scale=self.scale, causal=True).transpose(1, 2)


build = Attention
session = carried
