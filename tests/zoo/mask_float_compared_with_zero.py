"""minGPT's mask: a float lower triangle in a buffer, cut to size and compared with 0, the fill a finite -1e9. Legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.register_buffer("tril", torch.tril(torch.ones(CAPACITY, CAPACITY)).view(1, 1, CAPACITY, CAPACITY))

    def attend(self, q, k, v):
        S, T = q.shape[2], k.shape[2]
        att = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
        att = att.masked_fill(self.tril[:, :, T - S : T, :T] == 0, -1e9)
        return torch.nn.functional.softmax(att, dim=-1) @ v


build = Attention
session = carried
