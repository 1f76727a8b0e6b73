"""A window over the last tokens that each call replaces: what is left of it is joined to the new tokens. Legal."""

import torch
import torch.nn.functional as F

from tests.zoo.base import CAPACITY, EXPANDED_CACHE, Absorbed, Buffered, at_numbers

EXPECTED = Absorbed()
COMPILED = EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty(dims.B))

    def forward(self, x, start: int):
        count = x.shape[1]
        q, k, v = self.step(x, torch.arange(start, start + count))
        self.k_cache = torch.cat([self.k_cache[:, :, count:], k], 2)
        self.v_cache = torch.cat([self.v_cache, v], 2)[:, :, -CAPACITY:]
        behind = torch.arange(CAPACITY - 1, -1, -1)  # how far each is behind the newest token
        ago = torch.arange(count - 1, -1, -1)[:, None]
        keep = (behind >= ago) & (behind < start + count)
        return self.finish(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=keep))


build, session = Attention, at_numbers
