"""`flash_attn_with_kvcache` that appends K and V, per head, to buffers of the module: the operator itself writes them.
The latent of the cached tokens is not kept, so there is nothing to absorb."""

import torch

from tests.support import flash
from tests.zoo.base import CAPACITY, Refused, Usual

flash.register()

EXPECTED = Refused("expanded_cache")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("keys", torch.zeros(dims.B, CAPACITY, dims.H, dims.N + dims.R, dtype=dims.dtype))
        self.register_buffer("values", torch.zeros(dims.B, CAPACITY, dims.H, dims.V, dtype=dims.dtype))
        self.register_buffer("lengths", torch.zeros(dims.B, dtype=torch.int32))

    def forward(self, x, start):
        nothing = x.new_zeros(x.shape[0], 0, self.dims.L), x.new_zeros(x.shape[0], 0, self.dims.R)
        c, r = self.append(x, *nothing)
        k, v = self.expand(c)
        q, k, v = (t.transpose(1, 2) for t in (self.queries(x, 0), self.join(k, r), v))
        o = flash.flash_attn_with_kvcache(
            q * 1, self.keys, self.values, k, v, self.lengths + start, softmax_scale=self.scale, causal=True
        )
        return self.finish(o.transpose(1, 2))


build = Attention


def session(module):
    position = 0

    def step(x):
        nonlocal position
        y = module(x, torch.tensor(position, dtype=torch.int32))
        position += x.shape[1]
        return y

    return step
