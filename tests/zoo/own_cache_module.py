"""litgpt's KVCache: a module of its own holds the buffers, casts them to the dtype of K and assigns them anew, and
writes by index_copy_ into the sequences in use. Legal."""

from torch import nn

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_positions

EXPECTED = Absorbed()
COMPILED = EXPORTED = EXPANDED_CACHE


class Cache(nn.Module):
    def __init__(self, k, v):
        super().__init__()
        self.register_buffer("k", k, persistent=False)
        self.register_buffer("v", v, persistent=False)

    def forward(self, positions, k, v):
        self.k, self.v = self.k.to(k.dtype), self.v.to(v.dtype)
        B = k.shape[0]
        return self.k[:B].index_copy_(-2, positions, k), self.v[:B, ...].index_copy_(-2, positions, v)


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.cache = Cache(*self.empty())

    def reset(self):
        nn.init.zeros_(self.cache.k)
        nn.init.zeros_(self.cache.v)

    def forward(self, x, positions):
        q, k, v = self.step(x, positions)
        return self.over(q, *self.cache(positions, k, v), positions)


build, session = Attention, at_positions
