"""The attention's output is gated by a sigmoid of the input, head by head, and added to the residual, in a block with a
norm before and an MLP after it. Legal."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Block(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims
        self.attention = Usual(dims)
        r = self.attention.random
        self.pre, self.post = r.norm(dims.D), r.norm(dims.D)
        self.gate, self.wide, self.narrow = r.linear(dims.D, dims.D), r.linear(dims.D, 3), r.linear(3, dims.D)

    def forward(self, x, c_past, r_past):
        o, c, r = self.attention(self.pre(x), c_past, r_past)
        x = x + torch.sigmoid(self.gate(x)) * o
        return x + self.narrow(nn.functional.silu(self.wide(self.post(x)))), c, r


build = Block
session = carried
