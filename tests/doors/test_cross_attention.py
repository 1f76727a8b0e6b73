"""Keys and values of a memory, made once and kept by the caller: kept as rows, and absorbed in every later call."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from mla_compile.errors import StaleWeightError
from tests.support.compiling import flops_of
from tests.support.tiers import full

D, H, L, N, V, T, LAYERS = 40, 3, 16, 12, 10, 50, 1


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.q, self.o = nn.Linear(D, L), nn.Linear(D, H * N), nn.Linear(H * V, D)
        self.k, self.v = nn.Linear(L, H * N, bias=False), nn.Linear(L, H * V)

    def forward(self, x, memory, cache):
        if "k" not in cache:
            c = self.down(memory)
            cache["k"], cache["v"] = heads(self.k(c)), heads(self.v(c))
        o = F.scaled_dot_product_attention(heads(self.q(x)), cache["k"], cache["v"])
        return x + self.o(o.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Cross() for _ in range(LAYERS))

    def forward(self, x, memory, caches):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, memory, cache)
        return x


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_compile.MlaCompileWarning)
        yield


def empty():
    return [{} for _ in range(LAYERS)]


def steps(model, fast, memory, mine, theirs, count=3):
    for _ in range(count):
        x = torch.randn(2, 1, D).double()
        torch.testing.assert_close(fast(x, memory, mine), model(x, memory, theirs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=full("inductor"))])
def test_what_is_made_once_is_read_as_rows_in_every_call(codegen):
    model = Decoder().double().eval()
    fast = mla_compile.optimize(model, codegen=codegen)
    for _ in range(2):  # another memory begins anew
        memory, mine, theirs = torch.randn(2, T, D).double(), empty(), empty()
        steps(model, fast, memory, mine, theirs)
        # What the caller holds is K to all other code.
        torch.testing.assert_close(mine[0]["k"] + 0, theirs[0]["k"], rtol=1e-10, atol=1e-10)
    assert {site.code for site in fast.mla_report.sites} == {"absorbed"}
    if codegen == "eager":
        x = torch.randn(2, 1, D).double()
        counts = [flops_of(call, x, memory, caches) for call, caches in ((fast, mine), (model, theirs))]
        # Rows of L values are met twice where K and V were met once, and nothing is expanded for a cached token.
        attention, weights = T * (2 * L - N - V), L * (N + V)
        assert counts[0] - counts[1] <= LAYERS * 2 * H * 2 * (attention + weights)


def test_weights_that_are_replaced_later_made_no_key_of_these():
    model = Decoder().double().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    memory, mine, theirs = torch.randn(2, T, D).double(), empty(), empty()
    steps(model, fast, memory, mine, theirs, count=2)
    for layer in model.layers:
        layer.k = nn.Linear(L, H * N, bias=False).double()
    steps(model, fast, memory, mine, theirs, count=2)


def test_weights_that_change_in_place_are_noticed():
    model = Decoder().double().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    memory, mine, theirs = torch.randn(2, T, D).double(), empty(), empty()
    steps(model, fast, memory, mine, theirs, count=2)
    model.layers[0].k.weight.mul_(2)
    with pytest.raises(StaleWeightError):
        fast(torch.randn(2, 1, D).double(), memory, mine)
