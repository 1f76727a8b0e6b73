"""One up-projection whose first columns are all heads' keys and last columns all heads' values, chunked or split before
the heads are separated; the cache is a dict that the caller hands back. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, cache):
        d = self.dims
        start = cache["latent"].shape[1]
        c, r = self.append(x, cache["latent"], cache["rope"])
        cache = {"latent": c, "rope": r}
        k, v = self.up(c).split([d.H * d.N, d.H * d.V], dim=-1)
        k = k.reshape(x.shape[0], -1, d.H, d.N).transpose(1, 2)
        v = v.reshape(x.shape[0], -1, d.H, d.V).transpose(1, 2)
        return {"y": self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), "cache": cache}


build = Attention


class session:  # noqa: N801
    def __init__(self, module):
        self.module = module
        c, r = rows(module, module.dims.L, module.dims.R)
        self.cache = {"latent": c, "rope": r}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.module(x, self.cache)
        self.cache = result["cache"]
        return result["y"]
