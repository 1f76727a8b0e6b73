"""`flash_attn_varlen_func`: the sequences of the batch one after another, without padding. Legal: which rows a query
sees is read off the starts of the sequences, as a mask."""

import torch

from tests.support import flash
from tests.zoo.base import Absorbed, Usual, carried

flash.register()

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        (B, _, S, _), T = q.shape, k.shape[2]
        starts = torch.arange(B + 1, dtype=torch.int32)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = flash.flash_attn_varlen_func(q, k, v, starts * S, starts * T, S, T, softmax_scale=self.scale, causal=True)
        return o.unflatten(0, (B, S)).transpose(1, 2)


build = Attention
session = carried
