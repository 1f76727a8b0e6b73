"""Queries have a latent of their own, with a norm, as in DeepSeek-V2 and V3. Legal; K and V are not concerned."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.q_down = self.random.linear(dims.D, dims.Q, bias=True)
        self.q_norm = self.random.norm(dims.Q)
        self.q_up = self.random.linear(dims.Q, dims.H * (dims.N + dims.R), scale=2.0)

    def queries(self, x, start):
        d = self.dims
        q = self.q_up(self.q_norm(self.q_down(x))).view(x.shape[0], -1, d.H, d.N + d.R).transpose(1, 2)
        return torch.cat([q[..., : d.N], rope(q[..., d.N :], torch.arange(start, start + x.shape[1]))], -1)


build = Attention
session = carried
