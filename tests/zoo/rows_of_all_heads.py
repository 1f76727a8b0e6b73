"""DeepSeek-V4 without its compressed rows: one row per token is key and value of all heads, queries are normed and
rotated for each head, a sink is joined to the scores, and what was rotated in the rows is rotated back in the output.
No weight lies between the attention and the rows, so nothing is absorbed; a step becomes the operator as it is."""

import torch

from tests.zoo.base import Carry, Kept, Usual, causal, rope, rows

EXPECTED = Kept("shared_rows")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.width = d.N + d.R
        self.row, self.row_norm, self.sinks = r.linear(d.D, self.width), r.norm(self.width), r.weight(d.H)
        self.out = r.linear(d.H * self.width, d.D)

    def turned(self, x, positions):
        return torch.cat([x[..., : self.dims.N], rope(x[..., self.dims.N :], positions)], -1)

    def forward(self, x, past):
        d, start, S = self.dims, past.shape[1], x.shape[1]
        positions = torch.arange(start, start + S)
        q = self.q(x).view(*x.shape[:2], d.H, self.width).transpose(1, 2)
        q = self.turned(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6), positions)
        held = torch.cat([past, self.turned(self.row_norm(self.row(x)), positions)], 1)
        o = self.attend(q, *(self.repeated(held[:, None]) for _ in range(2)))
        o = self.turned(o, -positions)
        return self.finish(o), held

    def repeated(self, rows):
        B, _, T, W = rows.shape
        return rows[:, :, None].expand(B, 1, self.dims.H, T, W).reshape(B, self.dims.H, T, W)

    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        scores = scores + torch.zeros(scores.shape[-2:]).masked_fill(~causal(*scores.shape[-2:]), float("-inf"))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        both = torch.cat([scores, sinks], -1)
        return (both - both.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.N + module.dims.R))
