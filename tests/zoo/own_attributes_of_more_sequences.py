"""Meta's Llama and what came after it: plain tensors as attributes, made for the largest batch, moved to where the
input is in every call, written and read by slices. Legal."""

import torch

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, NotCaptured, at_numbers

EXPECTED = Absorbed()
COMPILED = EXPANDED_CACHE
EXPORTED = NotCaptured("k_cache is mutated in the forward method")


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.reset()

    def reset(self):
        self.k_cache, self.v_cache = (x.transpose(1, 2).contiguous() for x in self.empty())

    def forward(self, x, start: int):
        B, S, _ = x.shape
        q, k, v = self.step(x, torch.arange(start, start + S))
        self.k_cache, self.v_cache = self.k_cache.to(q), self.v_cache.to(q)
        self.k_cache[:B, start : start + S] = k.transpose(1, 2)
        self.v_cache[:B, start : start + S] = v.transpose(1, 2)
        keys, values = (c[:B, : start + S].transpose(1, 2) for c in (self.k_cache, self.v_cache))
        scores = q @ keys.transpose(2, 3) * self.scale
        if S > 1:
            scores = scores + torch.full((S, start + S), float("-inf"), dtype=x.dtype).triu(start + 1)
        return self.finish(scores.softmax(-1) @ values)


build, session = Attention, at_numbers
