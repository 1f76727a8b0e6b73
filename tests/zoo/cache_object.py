"""A cache class of one's own with `update(layer, c, r)` that keeps lists per layer, passed along and changed in place;
two layers with residuals. Legal, both."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Dims, NotExported, Usual, rope

EXPECTED = Absorbed(sites=2)
EXPORTED = NotExported("Cache")


class Cache:
    def __init__(self, layers):
        self.latents, self.ropes = [None] * layers, [None] * layers

    def length(self, layer):
        return 0 if self.latents[layer] is None else self.latents[layer].shape[1]

    def update(self, layer, c, r):
        if self.latents[layer] is not None:
            c = torch.cat([self.latents[layer], c], dim=1)
            r = torch.cat([self.ropes[layer], r], dim=1)
        self.latents[layer], self.ropes[layer] = c, r
        return c, r


class Attention(Usual):
    def __init__(self, dims, layer):
        super().__init__(Dims(**{**vars(dims), "seed": dims.seed + 10 * layer}))
        self.layer = layer

    def forward(self, x, cache):
        start = cache.length(self.layer)
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        c, r = cache.update(self.layer, self.norm(c), rope(r, torch.arange(start, start + x.shape[1])))
        k, v = self.expand(c)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v))


class Model(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims
        self.layers = nn.ModuleList(Attention(dims, i) for i in range(2))

    def forward(self, x, cache):
        for layer in self.layers:
            x = x + layer(x, cache)
        return x


build = Model


class session:  # noqa: N801
    def __init__(self, module):
        self.module, self.cache = module, Cache(2)

    def __call__(self, x):
        return self.module(x, self.cache)
