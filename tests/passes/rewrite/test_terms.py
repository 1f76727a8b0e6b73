"""Weights that are sums of products: applied term by term where that is cheaper, and added up where it is not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import fx, nn

from mla_compile import optimize
from mla_compile.capture.capture import from_graph_module
from mla_compile.options import Options
from mla_compile.passes.ir.axes import Atom
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.factors import MOST_TERMS, merged, narrowed, product, total
from mla_compile.pipeline import run
from tests.support.programs import noted_comparisons
from tests.support.tiers import also
from tests.support.toy import H, L, N, Toy, V, decode_inputs

pytestmark = pytest.mark.thorough

aten = torch.ops.aten
RANK = 3
FULL = H * N * L
"""Values of the weight that makes the keys; that of the values has fewer."""
COMPUTES = (aten.add.Tensor, aten.mul.Tensor, aten.einsum.default)


class Up(nn.Module):
    """An up-projection with narrow ones beside it."""

    def __init__(self, branches: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(L, H * (N + V), bias=False)
        self.down = nn.ModuleList(nn.Linear(L, RANK + k, bias=False) for k in range(branches))
        self.up = nn.ModuleList(nn.Linear(RANK + k, H * (N + V), bias=False) for k in range(branches))

    def branches(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [up(down(x)) for down, up in zip(self.down, self.up, strict=True)]


class Adapter(Up):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.7 * reduce(torch.add, self.branches(x))


class Subtracted(Up):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sub(self.base(x), self.branches(x)[0], alpha=3.0)


class Scaled(Up):
    """As DoRA: every output is scaled by a weight."""

    def __init__(self, branches: int) -> None:
        super().__init__(branches)
        self.magnitude = nn.Parameter(torch.rand(H * (N + V)) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.branches(x)[0]) * self.magnitude / 2


class Narrow(Up):
    """Two projections, one after the other, and nothing beside them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches(x)[0]


KINDS: dict[str, Callable[[], Up]] = {
    "one adapter": lambda: Adapter(1),
    "two adapters": lambda: Adapter(2),
    "subtracted": lambda: Subtracted(1),
    "scaled": lambda: Scaled(1),
    "two projections": lambda: Narrow(1),
}


def toy(up: nn.Module) -> Toy:
    model = Toy()
    model.up = up  # type: ignore[assignment]
    return model.double().eval().requires_grad_(False)


def traced(model: Toy, queries: int) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    inputs = tuple(x.double() for x in decode_inputs(queries=queries))
    with torch.no_grad():
        return torch.export.export(model, inputs).module(), inputs  # type: ignore[return-value]


def written(gm: fx.GraphModule) -> list[int]:
    """Sizes of the weights that the graph computes in each call."""
    weights = {n for n in gm.graph.nodes if n.op == "get_attr"}
    sizes = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            weights.add(node)
            if node.target in COMPUTES:
                sizes.append(math.prod(node.meta["val"].shape))
    return sizes


@functools.cache
def kind(name: str, queries: int) -> tuple[Toy, fx.GraphModule, tuple[torch.Tensor, ...]]:
    """A model of ``KINDS``, traced; for tests that leave it as it is."""
    model = toy(KINDS[name]())
    return model, *traced(model, queries)


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("two adapters", 2), ("subtracted", 1), ("scaled", 1), ("two projections", 1),
        *also("combination", ("one adapter", 1), ("one adapter", 2), ("scaled", 2)),
    ],
)  # fmt: skip
def test_few_rows_meet_the_terms_one_by_one(name: str, queries: int) -> None:
    model, gm, inputs = kind(name, queries)
    fast = optimize(gm, inputs, forms="absorbed")
    assert fast.meta["mla_report"].absorbed == 1
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-10, atol=1e-10)
    assert all(size < H * V * L for size in written(fast))


@pytest.mark.parametrize(
    "name", ["scaled", "two projections", *also("combination", "one adapter", "two adapters", "subtracted")]
)
def test_many_rows_meet_the_sum(name: str) -> None:
    model, gm, inputs = kind(name, 400)
    fast = optimize(gm, inputs, forms="absorbed")
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-10, atol=1e-10)
    # Two narrow projections are cheaper than their product for any number of rows.
    assert (max(written(fast), default=0) >= FULL) == (name != "two projections")


@pytest.mark.parametrize(
    "name", ["scaled", *also("combination", "two projections", "one adapter", "two adapters", "subtracted")]
)
def test_weights_that_are_folded_are_added_up_ahead_of_time(name: str) -> None:
    model, gm, inputs = kind(name, 1)
    fast = optimize(gm, inputs, forms="absorbed", fold="always")
    (site,) = fast.meta["mla_report"].sites
    assert site.form == "folded"
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-10, atol=1e-10)
    assert not written(fast)


class NormedKeys(Toy):
    """A norm on the keys of each head: the values are absorbed alone."""

    def attend(self, x: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, H, -1)[..., :N].transpose(1, 2)
        k, v = self.up(rows[..., :L]).unflatten(-1, (H, N + V)).transpose(1, 2).split([N, V], dim=-1)
        o = torch.nn.functional.scaled_dot_product_attention(q, torch.nn.functional.rms_norm(k, (N,)), v)
        return self.out(o.transpose(1, 2).flatten(2))


def test_values_alone() -> None:
    model = NormedKeys()
    model.up = Adapter(1)  # type: ignore[assignment]
    model.double().eval().requires_grad_(False)
    gm, inputs = traced(model, 1)
    fast = optimize(gm, inputs, forms="absorbed")
    (site,) = fast.meta["mla_report"].sites
    assert site.verdict == "absorbed"
    assert [part.startswith("values") for part in site.parts] == [True]
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-10, atol=1e-10)
    assert H * V * L not in written(fast)  # unlike the weight of the keys, which meets all tokens


def factor(*atoms: Atom) -> Factor:
    node = fx.Graph().placeholder("w")
    node.meta["val"] = torch.empty([int(a.size) for a in atoms], device="meta")
    return Factor(Expr.leaf(node, None), atoms)


def test_what_is_remembered_of_a_sum() -> None:
    a, b, r = Atom(5), Atom(4), Atom(2)
    one, other = factor(a, b), product(factor(a, r), factor(r, b), [r])
    added = total(one, other, 0.5)
    assert added is not None
    assert [len(term) for term in added.terms] == [1, 2]
    # A scale goes to the smallest factor of each term.
    assert [f.expr.op is aten.mul.Tensor for f in added.terms[1]] == [False, True]
    for kept in (narrowed(added, a, Atom(2), 1, 3), added.renamed({a: Atom(5)}), added.split({a: a.split(1, 5)})):
        assert [len(term) for term in kept.terms] == [1, 2]
        assert all({*f.atoms} <= {*kept.atoms, r} for term in kept.terms for f in term)
    # A tensor that lacks an axis is repeated along it: summed over that axis it would count but once.
    assert total(one, factor(a)).terms == ()  # type: ignore[union-attr]
    # An axis that is only partly one of a narrow factor cannot be cut there.
    assert merged(added, (a, b), Atom(20)).terms == ()
    # Nothing is gained by a sum of very many.
    many = reduce(lambda x, _: total(x, other), range(MOST_TERMS), one)
    assert many is not None
    assert len(many.terms) <= MOST_TERMS


def test_the_graph_before_and_after() -> None:
    gm, _ = traced(toy(Adapter(1)), 1)
    after = run(from_graph_module(gm), Options(forms="absorbed", verify=True)).program.gm
    einsums = [n.args[0] for n in after.graph.nodes if n.target is aten.einsum.default]
    # q W_k, q B, (q B) A; o W_v, o A, (o A) B
    assert einsums == ["abc,bcd->abd", "abc,bcd->abd", "abc,cd->abd", "abc,bdc->abd", "abc,dc->abd", "abc,bdc->abd"]


def test_a_site_with_an_adapter_and_one_without_are_checked_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ups = (Adapter(1), Adapter(2), nn.Linear(L, H * (N + V), bias=False), Adapter(2, seed=1))
            self.layers = nn.ModuleList(map(toy, ups))

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(*given)[0] for layer in self.layers])

    made = noted_comparisons(monkeypatch)
    gm, _ = traced(Four(), 1)
    assert run(from_graph_module(gm), Options(forms="absorbed", verify=True)).absorbed == 4
    assert len(made) == 3
