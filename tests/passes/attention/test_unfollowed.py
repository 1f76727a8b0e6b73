"""What looks like an attention and is not found to be one, and what only has a softmax."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.programs import codes, export, optimized, seeded


class Pooled(nn.Module):
    """Tokens are put together in pairs, each column by a softmax of its own, between two products of activations."""

    def __init__(self, each: bool):
        super().__init__()
        self.each = each

    def forward(self, x, y):
        x = torch.tanh(x @ y.mT) @ y
        pairs, gates = x.unflatten(1, (-1, 2)), torch.tanh(x).unflatten(1, (-1, 2))
        if self.each:
            rows = (pairs * gates.softmax(2)).sum(2)
        else:  # one weight for all columns
            rows = (pairs * gates.sum(-1, keepdim=True).tanh().softmax(2)).sum(2)
        return torch.tanh(rows) @ y.mT


def test_a_gate_of_each_column_is_no_attention():
    given = [seeded(2, 6, 4), seeded(2, 5, 4, seed=1)]
    assert codes(optimized(export(Pooled(each=True), given))) == []
    assert codes(optimized(export(Pooled(each=False), given))) != []
