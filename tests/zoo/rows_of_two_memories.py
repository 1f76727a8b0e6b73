"""DeepSeek-V4's sparse layers: heads share the rows of the last tokens beside rows that each stand for several tokens,
of which an indexer picks some. The two are joined for each step; a step attends to each of them instead."""

import torch

from tests.zoo.base import Carry, Kept, causal, rows
from tests.zoo.rows_of_all_heads import Attention as OneMemory

EXPECTED = Kept("shared_rows")
WINDOW, RATE, PICKED = 5, 2, 2


class Attention(OneMemory):
    def __init__(self, dims):
        super().__init__(dims)
        self.squeezed = self.random.linear(dims.D, self.width)

    def forward(self, x, last, waiting, compressed):
        d, S = self.dims, x.shape[1]
        q = self.q(x).view(*x.shape[:2], d.H, self.width).transpose(1, 2)
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
        window = torch.cat([last, self.row_norm(self.row(x))], 1)
        waiting = torch.cat([waiting, self.squeezed(x)], 1)
        full = waiting.shape[1] // RATE * RATE
        new = waiting[:, :full].unflatten(1, (-1, RATE)).mean(2)
        compressed = torch.cat([compressed, torch.tanh(new)], 1)
        keep = causal(S, window.shape[1])
        mask = torch.zeros(x.shape[0], 1, S, window.shape[1], dtype=x.dtype).masked_fill(~keep, float("-inf"))
        mask = torch.cat([mask, self.picked(q, compressed)], -1)
        held = torch.cat([window, compressed], 1)[:, None]
        o = self.attend(q, self.repeated(held), self.repeated(held), mask)
        return self.finish(o), window[:, -WINDOW:], waiting[:, full:], compressed

    def picked(self, q, compressed):
        """Zeros for the keys of a list, minus infinity for the others; an entry for none is written behind them all."""
        B, C = compressed.shape[:2]
        scores = torch.einsum("bhsw,bcw->bshc", q[:, :2], compressed).relu().sum(2)
        index = scores.topk(min(PICKED, C), -1).indices
        index = torch.where(index < 0, torch.full_like(index, C), index)
        bias = scores.new_full((B, 1, q.shape[2], C + 1), float("-inf"))
        bias.scatter_(-1, index[:, None], 0.0)
        return bias[..., :C]

    def attend(self, q, k, v, mask):
        scores = q @ k.mT * self.scale + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


build = Attention


def session(module):
    width = module.dims.N + module.dims.R
    return Carry(module, *rows(module, width, width, width))
