"""A NamedTuple of caches goes in and a dataclass with result and cache comes out. Legal."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, rows

EXPECTED = Absorbed()


class Cache(NamedTuple):
    latent: torch.Tensor
    rotary: torch.Tensor


@dataclass
class Output:
    hidden: torch.Tensor
    cache: Cache


pytree.register_dataclass(Output)


class Attention(LatentLayer):
    def forward(self, x, cache):
        y, *cache = super().forward(x, cache.latent, cache.rotary)
        return Output(y, Cache(*cache))


build = Attention


class Step:
    def __init__(self, module):
        self.module = module
        self.cache = Cache(*rows(module, module.dims.L, module.dims.R))

    def __call__(self, x):
        output = self.module(x, self.cache)
        self.cache = output.cache
        return output.hidden


session = Step
