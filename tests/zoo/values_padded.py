"""V is padded to the width of K for kernels that want one width, and cut afterwards. Legal."""

import torch.nn.functional as F

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        v = F.pad(v, [0, q.shape[-1] - v.shape[-1]])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[2], k.shape[2]))
        return o[..., : self.dims.V]


build = Attention
session = carried
