"""Compressed convolutional attention (ZAYA): queries and keys are narrow and convolved over the last tokens, half of a
value is that of the token before, and attention happens in that narrow space. Not MLA: K and V are cached as narrow as
they are, and no weight makes wider ones of them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.base import Carry, Layer, NotMla, causal, rope, rows

EXPECTED = NotMla()
KERNEL = 3


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.width = (d.H + 1) * d.N
        self.narrow, self.v, self.v_before = r.linear(d.D, self.width), r.linear(d.D, d.V), r.linear(d.D, d.V)
        self.conv = nn.Conv1d(self.width, self.width, KERNEL, groups=self.width, dtype=dims.dtype)
        self.conv.weight.data, self.conv.bias.data = r.tensor(self.width, 1, KERNEL), r.tensor(self.width)
        self.out = r.linear(d.H * 2 * d.V, d.D)

    def forward(self, x, last, before, k_past, v_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(k_past.shape[1], k_past.shape[1] + S)
        narrow = torch.cat([last, self.narrow(x)], 1)
        mixed = self.conv(narrow.mT).mT + narrow[:, KERNEL - 1 :]
        q, k = mixed.split([d.H * d.N, d.N], -1)
        q = rope(F.normalize(q.view(B, S, d.H, d.N), dim=-1).transpose(1, 2), positions)
        k = torch.cat([k_past, rope(F.normalize(k, dim=-1), positions)], 1)
        delayed = torch.cat([before, self.v_before(x)], 1)
        v = torch.cat([v_past, torch.cat([self.v(x), delayed[:, :-1]], -1)], 1)
        keys, values = (t[:, None].expand(-1, d.H, -1, -1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal(S, k.shape[1]), scale=3.0)
        return self.out(o.transpose(1, 2).flatten(2)), narrow[:, 1 - KERNEL :], delayed[:, -1:], k, v


build = Attention


def session(module):
    d = module.dims
    _, _, k, v = rows(module, 1, 1, d.N, 2 * d.V)
    empty = (torch.zeros(d.B, n, width, dtype=d.dtype) for n, width in ((KERNEL - 1, module.width), (1, d.V)))
    return Carry(module, *empty, k, v)
