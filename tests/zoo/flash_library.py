"""`flash_attn_func` as models call it: tokens before heads, V padded to the width of K, the diagonal at the last key.
Legal."""

import torch.nn.functional as F

from tests.support import flash
from tests.zoo.base import Absorbed, Usual, carried

flash.register()

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        v = F.pad(v, [0, q.shape[-1] - v.shape[-1]])
        o = flash.flash_attn_func(q, k, v, softmax_scale=self.scale, causal=True)
        return o[..., : self.dims.V].transpose(1, 2)


build = Attention
session = carried
