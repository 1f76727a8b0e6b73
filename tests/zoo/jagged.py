"""Sequences of different lengths as one jagged nested tensor. Refused: a nested tensor is several."""

import torch
import torch.nn.functional as F

from tests.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("unsupported_op")


class Attention(LatentLayer):
    def forward(self, x, c_past, r_past):
        q, c, r = self.rows(x, c_past, r_past)
        k, v = self.expand(c)
        q, k, v = (
            torch.nested.nested_tensor(list(t.transpose(1, 2).unbind()), layout=torch.jagged).transpose(1, 2)
            for t in (q, self.join(k, r), v)
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        o = torch.stack(list(o.unbind()))
        return self.out(o.flatten(2)), c, r


build = Attention
session = carried
