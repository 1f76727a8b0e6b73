"""A graph as calls of its parts: the same numbers, the same writes, one part for layers of one kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.repeats import find
from mla_compile.repeats.split import split
from mla_compile.repeats.stretches import memory_of

aten = torch.ops.aten
LAYERS = 4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "LEAST_LENGTH", 3)


def traced(function: Any, *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    """A graph in the form in which ours reach the code generator: writes to inputs at the end."""
    return make_fx(torch.func.functionalize(function, remove="mutations_and_views"), tracing_mode=mode)(*inputs)


def fakes(gm: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.find_nodes(op="call_module")]


def compare(function: Any, *inputs: Any, mode: str = "fake") -> list[str]:
    """The parts in the order of their calls, after their results and writes were compared with the function's own."""
    gm = traced(function, *inputs, mode=mode)
    before = str(gm.graph)
    found = split(gm, fakes(gm))
    assert found is not None
    assert str(gm.graph) == before
    ours, wanted = ([x.clone() if isinstance(x, Tensor) else x for x in inputs] for _ in range(2))
    torch.testing.assert_close(found[0](*ours), function(*wanted), rtol=0, atol=0)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    called = names(found[0])
    assert set(called) == set(found[1])
    for name, values in found[1].items():
        part: Any = found[0].get_submodule(name)
        assert len(part.graph.find_nodes(op="placeholder")) == len(values)
    return called


def layer(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.sin(x @ w) * 2.0


def weights(count: int = LAYERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator) for _ in range(count)]


def test_layers_become_calls_of_one_part() -> None:
    def run(x: Tensor, *ws: Tensor) -> Tensor:
        x = torch.tanh(x)
        for w in ws:
            x = layer(x, w)
        return torch.relu(x).sum()

    assert compare(run, torch.ones(2, 3), *weights()) == ["part_0", *["part_1"] * LAYERS, "part_2"]


def test_what_single_layers_return_is_returned_by_all() -> None:
    def run(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for place, w in enumerate(ws):
            x = layer(x, w)
            if place in (1, 2):
                kept.append(x)
        return (*kept, x)

    assert compare(run, torch.ones(2, 3), *weights()) == ["part_0"] * LAYERS


def test_caches_are_written_where_they_are_last_read() -> None:
    def run(x: Tensor, place: Tensor, *rest: Tensor) -> Tensor:
        for w, cache in zip(rest[:LAYERS], rest[LAYERS:], strict=True):
            cache.index_copy_(0, place, x @ w)
            x = x + torch.softmax(x @ cache.t(), -1) @ cache
        return x

    inputs = torch.ones(1, 3), torch.tensor([2]), *weights(), *(torch.zeros(5, 3) for _ in range(LAYERS))
    gm = traced(run, *inputs)
    writes = [node.target is aten.copy_.default for node in gm.graph.nodes][-LAYERS - 1 : -1]
    assert all(writes), "the graph writes at its end"
    assert compare(run, *inputs) == ["part_0"] * LAYERS


def test_the_old_rows_of_a_cache_are_read_before_they_are_overwritten() -> None:
    def run(x: Tensor, place: Tensor, *rest: Tensor) -> Tensor:
        for w, cache in zip(rest[:LAYERS], rest[LAYERS:], strict=True):
            old = cache[2].clone()
            new = cache.index_copy(0, place, x @ w)
            cache.copy_(new)
            x = x + old + new.sum(0)
        return x

    inputs = torch.ones(1, 3), torch.tensor([2]), *weights(), *(torch.ones(5, 3) for _ in range(LAYERS))
    assert compare(run, *inputs) == ["part_0"] * LAYERS


def test_a_cache_that_is_read_behind_all_layers_keeps_its_old_rows_till_then() -> None:
    def run(x: Tensor, place: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        caches, total = rest[LAYERS:], x.sum()
        for w, cache in zip(rest[:LAYERS], caches, strict=True):
            x = x + cache.index_copy(0, place, layer(x, w)).sum(0)
        for w, cache in zip(rest[:LAYERS], caches, strict=True):
            total = total + cache.sum()
            cache.index_copy_(0, place, w[:1])
        return x, total

    inputs = torch.ones(1, 3), torch.tensor([2]), *weights(), *(torch.ones(5, 3) for _ in range(LAYERS))
    compare(run, *inputs)


def caches(x: Tensor, *rest: Tensor) -> Tensor:
    for w, cache in zip(rest[:LAYERS], rest[LAYERS:], strict=True):
        cache.add_(x @ w)
        x = x + torch.sin(cache) * 2.0
    return x


def test_memory_that_two_inputs_share_is_not_written_by_a_part() -> None:
    own = [torch.zeros(2, 3) for _ in range(LAYERS)]
    gm = traced(caches, torch.ones(2, 3), *weights(), *own)
    assert split(gm, fakes(gm)) is not None
    shared = torch.zeros(2, 3)
    given = [torch.ones(2, 3), *weights(), *own[:-2], shared, shared.view(2, 3)]
    assert split(gm, given) is None


def test_a_tensor_without_memory_of_its_own_shares_it_with_no_other() -> None:
    one, other = (torch.eye(3).to_sparse() for _ in range(2))
    assert memory_of(one) == memory_of(one) != memory_of(other)


def test_an_input_that_is_a_view_of_what_is_written_is_refused() -> None:
    """The view is made in front of the layers: one part would be given the same memory twice."""
    graph = fx.Graph()
    value = torch.ones(2, 3)

    def input_(name: str) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    x, *given = (input_(name) for name in ("x", *(f"cache_{i}" for i in range(LAYERS))))
    views = [call(aten.alias.default, cache) for cache in given]
    for cache, view in zip(given, views, strict=True):
        new = call(aten.sin.default, x)
        call(aten.copy_.default, cache, new)
        x = call(aten.add.Tensor, call(aten.exp.default, new), view)
    graph.output((x,))
    gm = fx.GraphModule({}, graph)
    values = [value.clone() for _ in range(LAYERS + 1)]
    assert split(gm, values) is None


def test_sizes_are_inputs_of_the_parts_that_need_them() -> None:
    def run(x: Tensor, count: int, *ws: Tensor) -> Tensor:
        places = torch.arange(count) * 1.0
        for w in ws:
            x = x + torch.sin(x @ w) * places.sum()
        return x

    gm = traced(run, torch.ones(1, 3), 7, *weights(), mode="symbolic")
    found = split(gm, fakes(gm))
    assert found is not None
    for values in found[1].values():
        assert sum(isinstance(value, torch.SymInt) for value in values) == 1
    assert compare(run, torch.ones(1, 3), 7, *weights(), mode="symbolic") == ["part_0", *["part_1"] * LAYERS]


def test_a_size_that_no_input_says_keeps_the_graph_whole() -> None:
    def run(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = layer(x, w)
        return x

    gm = traced(run, torch.ones(5, 3), *weights(), mode="symbolic")
    assert split(gm, fakes(gm)) is not None, "the sizes of x and of the weights say it"
    doubled = traced(lambda x, *ws: run(torch.cat((x, x)), *ws).sum(), torch.ones(5, 3), *weights(), mode="symbolic")
    assert split(doubled, fakes(doubled)) is None, "a part is given twice the rows, and nothing of their number"


def test_sizes_that_depend_on_data_keep_the_graph_whole() -> None:
    def run(x: Tensor, *ws: Tensor) -> Tensor:
        chosen = x.nonzero()
        for w in ws:
            x = layer(x, w) + chosen.sum()
        return x

    gm = traced(run, torch.ones(2, 3), *weights(), mode="symbolic")
    assert split(gm, fakes(gm)) is None


def test_items_of_a_tuple_stay_with_it() -> None:
    def run(x: Tensor, *ws: Tensor) -> Tensor:
        left, right = torch.split(torch.cat((x, x), -1), 3, -1)
        for w in ws:
            left = layer(left, w) * right
        return left + right

    compare(run, torch.ones(2, 3), *weights())


def test_nothing_to_split() -> None:
    gm = traced(layer, torch.ones(2, 3), weights()[0])
    assert split(gm, fakes(gm)) is None


def test_layers_that_read_different_things_in_the_same_places_are_different_kinds() -> None:
    def run(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = x + torch.sin(x @ w) * 2.0
        for w in ws:
            x = x + torch.sin(w @ x) * 2.0
        return x

    called = compare(run, torch.ones(3, 3), *weights())
    assert called == ["part_0"] * LAYERS + ["part_1"] * LAYERS
