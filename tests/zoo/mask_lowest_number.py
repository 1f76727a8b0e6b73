"""transformers' mask: the dtype's lowest number added after the scale, made by the caller for prompt and step.
Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, causal, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past, attention_mask=None):
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        weights = torch.matmul(self.queries(x, start), self.join(k, r).transpose(2, 3)) * self.scale
        if attention_mask is not None:
            weights = weights + attention_mask[:, :, :, : k.shape[-2]]
        weights = torch.nn.functional.softmax(weights, dim=-1).to(x.dtype)
        return self.finish(torch.matmul(weights, v)), c, r


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        self.module, self.cache = module, rows(module, module.dims.L, module.dims.R)

    def __call__(self, x):
        S, T = x.shape[1], x.shape[1] + self.cache[0].shape[1]
        mask = torch.zeros(x.shape[0], 1, S, T, dtype=x.dtype)
        mask = mask.masked_fill(~causal(S, T), torch.finfo(x.dtype).min)
        y, *self.cache = self.module(x, *self.cache, attention_mask=mask)
        return y
