"""Lengths of growing caches: any number of tokens after two compilations, and one symbol for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile import optimize
from mla_compile.dynamo import compiler as compilers
from mla_compile.dynamo.sizes import History, _loose_axes
from mla_compile.runtime.latent import LatentTensor
from tests.support import models
from tests.support.compiling import compiler
from tests.support.programs import seeded
from tests.support.tiers import full
from tests.support.toy import Toy, decode_inputs

H, L, N, V, D, LAYERS = 2, 8, 6, 5, 12, 2
Past = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Attention that caches K and V of each head, whose rows are narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.down = nn.Linear(D, H * N), nn.Linear(D, L)
        self.up, self.out = nn.Linear(L, H * (N + V), bias=False), nn.Linear(H * V, D)

    def forward(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        q = self.query(x).unflatten(-1, (H, N)).transpose(1, 2)
        k, v = self.up(self.down(x)).unflatten(-1, (H, N + V)).transpose(1, 2).split([N, V], -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return x + self.out(y.transpose(1, 2).flatten(2)), (k, v)


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, pasts: list[Past | None]) -> tuple[Tensor, list[Past]]:
        kept = []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, new = layer(x, past)
            kept.append(new)
        return x, kept


Change = Callable[[int, list[Any]], list[Any]]


class Counted:
    """A backend, and how many lengths each of its graphs tells apart."""

    def __init__(self) -> None:
        self.compiler = compiler(codegen="eager", lowering="op", cache="latent")
        self.lengths: list[int] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        call = self.compiler(gm, inputs)
        inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        sizes = [size for value in inputs if isinstance(value, Tensor) for size in value.shape]
        self.lengths.append(len({size.node.expr for size in sizes if isinstance(size, torch.SymInt)}))
        return call


def graphs(
    backend: Counted, steps: int, change: Change = lambda step, pasts: pasts, layers: int = LAYERS, **settings: Any
) -> list[int]:
    """How many graphs there are after a prompt and after each step, whose numbers are the model's own."""
    torch.manual_seed(0)
    model, counts = Model(layers).eval().requires_grad_(False), []
    fast = torch.compile(model, backend=backend, **settings)
    mine: list[Any] = [None] * layers
    theirs: list[Any] = [None] * layers
    for step in range(steps + 1):
        x = seeded(1, 1 if step else 7, D, seed=step, dtype=torch.float32)
        got, mine = fast(x, mine)
        want, theirs = model(x, theirs)
        torch.testing.assert_close(got, want)
        assert all(isinstance(k, LatentTensor) for k, _ in mine)
        mine, theirs = change(step, mine), change(step, theirs)
        counts.append(len(backend.lengths))
    return counts


def test_lengths_are_one_in_all_layers_until_they_part():
    """Steps are compiled once for any length, and once more where the layers have several."""

    def window(step: int, pasts: list[Any]) -> list[Any]:
        """The last layer keeps four tokens, after the second step."""
        return pasts if step < 2 else [*pasts[:-1], tuple(t[:, :, -4:] for t in pasts[-1])]

    backend = Counted()
    assert graphs(backend, 4, window) == [1, 2, 2, 3, 3]
    assert backend.lengths == [0, 1, 2]
    assert backend.compiler.reports[1].absorbed == LAYERS


def test_lengths_are_one_while_an_optimized_module_is_traced(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    share_lengths = compilers.share_lengths

    def noting(gm: torch.fx.GraphModule, history: History | None) -> None:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
        seen.append(len({size.node._expr for size in sizes if isinstance(size, torch.SymInt)}))
        share_lengths(gm, history)

    monkeypatch.setattr(compilers, "share_lengths", noting)
    model = Model().eval().requires_grad_(False)
    fast, mine, theirs = optimize(model, codegen="eager"), [None] * LAYERS, [None] * LAYERS
    for step, tokens in enumerate((7, 1, 1)):
        x = seeded(1, tokens, D, seed=step, dtype=torch.float32)
        got, mine = fast(x, mine)
        want, theirs = model(x, theirs)
        torch.testing.assert_close(got, want)
    assert seen == [0, 1]


def test_axes_that_lie_as_in_the_whole():
    """Also where one sequence has no other after it: Dynamo compares the stride."""
    whole = torch.empty(1, 2, 9, 4)
    assert _loose_axes(whole) == []
    assert _loose_axes(whole[:, :, -3:]) == [1, 0]
    assert _loose_axes(whole[:, 1:]) == [0]
    assert _loose_axes(torch.empty(1, 9, 4)[:, -3:]) == [0]
    assert _loose_axes(whole[..., :2]) == [2, 1, 0]


def test_every_length_is_compiled_by_itself_where_that_is_wanted():
    assert graphs(Counted(), steps=2, layers=1, dynamic=False) == [1, 2, 3]


def test_steps_of_a_module_that_caches_rows_are_compiled_once():
    model, backend = Toy().eval(), compiler(codegen="eager")
    x, rows = decode_inputs(cached=0, queries=9)
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for tokens in (9, 1, 1, 1):
            _, rows = fast(x[:, :tokens], rows)
    assert [report.absorbed > 0 for report in backend.reports] == [False, True]


@full("family")
def test_steps_of_a_model_that_caches_rows_are_compiled_once():
    model, backend, cache = models.build("minicpm3", num_hidden_layers=1), compiler(codegen="eager"), None
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for tokens in (9, 1, 1, 1):
            cache = fast(torch.full((2, tokens), 7), past_key_values=cache, use_cache=True).past_key_values
    assert [report.absorbed > 0 for report in backend.reports] == [False, True]
