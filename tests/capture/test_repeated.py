"""Each kind of layer traced once gives the graph of one trace of all, or is left to that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile.capture.functional import Functional, traced_once
from mla_compile.capture.repeated import traced_by_kind
from mla_compile.core.alike import known_of
from mla_compile.repeats import find

LAYERS = 4


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "LEAST_LENGTH", 4)


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[Functional | None, Functional]:
    """The graph by kinds, where there is one, and that of one trace, of what Dynamo makes of a function.

    They are run, and compute the same bits.
    """
    found: list[tuple[Functional | None, Functional | None]] = []

    def run(*given: Any) -> Any:
        ((ours, whole),) = found
        assert whole is not None
        wanted = whole.gm(*given)
        if ours is not None:
            torch.testing.assert_close(ours.gm(*given), wanted, rtol=0, atol=0)
        return wanted[len(whole.written) :]

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        before = str(gm.graph)
        with torch.no_grad():
            found.append((traced_by_kind(gm, examples), traced_once(gm, examples)))
        assert str(gm.graph) == before
        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    ((ours, whole),) = found
    assert whole is not None
    return ours, whole


def described(one: Functional) -> list[Any]:
    """What is known of every tensor, and the module and line that it came from; sizes by their expressions."""
    names: dict[fx.Node, str] = {}
    rows: list[Any] = []
    for node in one.gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            names[node] = str(value)
            continue
        names[node] = f"tensor {len(rows)}"
        known = str((value.shape, value.stride(), value.dtype)) if isinstance(value, Tensor) else str(value)
        # Constants have names of their own in either, and are compared as values.
        target = getattr(one.gm, str(node.target)).tolist() if node.op == "get_attr" else str(node.target)
        given = str(fx.map_arg((node.args, node.kwargs), names.__getitem__))
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        rows.append(
            (node.op, "" if node.op == "placeholder" else target, given, known, modules, node.meta.get("stack_trace"))
        )
    return [*rows, one.written, one.tokens]


def sizes(one: Functional) -> int:
    """How many calls compute sizes."""
    return sum(
        isinstance(node.meta.get("val"), torch.SymInt) and node.op == "call_function" for node in one.gm.graph.nodes
    )


class Layer(nn.Module):
    """Writes to a buffer of its own, two pieces of one product, a constant, a read at numbers."""

    rows: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, 2 * width)
        self.register_buffer("rows", torch.zeros(2, 8, width))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        left, right = self.product(x).split(x.shape[-1], dim=-1)
        self.rows.index_copy_(1, place, left)
        scores = (right @ self.rows.mT).softmax(-1)
        result: Tensor = x + scores @ self.rows * torch.tensor([0.5]) + x[..., ::2].sum()
        return result


class Stack(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(width) for _ in range(LAYERS))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *more)
        return x.relu()


class Grown(nn.Module):
    """A cache of any length that comes in and grows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, width)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        rows = torch.cat((past, self.product(x)), dim=1)
        result: Tensor = x + (x @ rows.mT).softmax(-1) @ rows + rows.mT.reshape(x.shape[0], -1).sum()
        return result


def counted(graph: fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def test_writes_constants_and_modules_are_those_of_one_trace() -> None:
    ours, whole = traced(Stack(), torch.randn(2, 3, 6), torch.arange(3))
    assert ours is not None
    assert described(ours) == described(whole)
    assert len(ours.written) == LAYERS
    modules = {str(node.meta["nn_module_stack"]) for node in ours.gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linear.default)}  # fmt: skip
    assert len(modules) == LAYERS


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_are_named_once(dynamic: bool) -> None:
    class Cached(Stack):
        def forward(self, x: Tensor, *pasts: Any) -> Tensor:
            for layer, past in zip(self.layers, pasts, strict=True):
                x = layer(x, past)
            return x.relu()

    pasts = [torch.randn(2, 5, 6) for _ in range(LAYERS)]
    ours, whole = traced(Cached(Grown), torch.randn(2, 1, 6), *pasts, dynamic=dynamic)
    assert ours is not None
    assert described(ours) == described(whole)
    assert sizes(ours) <= sizes(whole)


def test_a_view_of_what_a_layer_writes_may_be_returned_by_it() -> None:
    class Returned(Layer):
        def forward(self, x: Tensor, place: Tensor) -> Any:
            return super().forward(x, place), self.rows[0]

    class Collected(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            kept = []
            for layer in self.layers:
                x, shown = layer(x, *more)
                kept.append(shown)
            return x.relu().sum() + torch.stack(kept).sum()

    ours, whole = traced(Collected(Returned), torch.randn(2, 3, 6), torch.arange(3))
    assert ours is not None
    assert ours.written == whole.written


def test_a_kind_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counting(*args: Any) -> Functional | None:
        nonlocal calls
        calls += 1
        return traced_once(*args)

    monkeypatch.setattr("mla_compile.capture.repeated.traced_once", counting)
    ours, _ = traced(Stack(), torch.randn(2, 3, 6), torch.arange(3))
    assert ours is not None
    assert calls <= 3  # what comes before the layers, a layer, what comes behind them


def test_kinds_that_differ_in_a_number_are_not_one() -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x, *more) * (2.0 if i < 3 else 3.0)
            return x

    ours, whole = traced(Scaled(), torch.randn(2, 3, 6), torch.arange(3))
    assert ours is not None
    assert described(ours) == described(whole)


def layers_of(first: Callable[..., Any], step: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` in every layer, given a number of the layer and what ``first`` returns, then ``last`` of that."""

    def run(x: Tensor, *more: Tensor) -> Any:
        known = first(*more)
        for _ in range(LAYERS):
            for _ in range(4):
                x = (x * 2).sin() + 1
            step(x.sum(), *known)
        return x, last(*known)

    return run


def same(*more: Tensor) -> Sequence[Tensor]:
    return more


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "a view that was shown before": (
        lambda table: (table, table.view(-1)), lambda x, table, shown: table.add_(x), lambda table, shown: shown * 2),
    "through a view": (
        lambda table: (table, table.view(-1)), lambda x, table, shown: shown.add_(x), lambda table, shown: table * 2),
    "a value": (lambda table: (table * 2,), lambda x, sums: sums.add_(x), lambda sums: sums * 2),
    "an input": (lambda table: (table,), lambda x, table: table.add_(x), lambda table: table * 2),
}  # fmt: skip


@pytest.mark.parametrize("parts", WRITES.values(), ids=WRITES)
def test_what_a_layer_writes_is_seen_by_all(parts: Any) -> None:
    ours, whole = traced(layers_of(*parts), torch.randn(5), torch.randn(2, 2))
    assert ours is None or described(ours) == described(whole)
    assert (ours is None) == (parts is not WRITES["an input"])


def test_a_write_stays_behind_what_is_read_through_a_view() -> None:
    def run(x: Tensor, *tables: Tensor) -> Tensor:
        for table in tables:
            shown, new = table.view(-1), table + x.sum()
            total = shown.exp().sum()
            torch.ops.aten.copy_.default(table, new)
            x = (x * 2).sin() + total
        return x

    ours, whole = traced(run, torch.randn(5), *(torch.randn(2, 2) for _ in range(LAYERS)))
    assert ours is not None
    assert described(ours) == described(whole)


def test_a_view_that_dynamo_did_not_make_may_show_what_is_written() -> None:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        for node in gm.graph.find_nodes(op="call_method", target="view"):
            node.meta["val"] = node.meta.pop("example_value")
        found.append(traced_by_kind(gm, examples))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        function = layers_of(*WRITES["a view that was shown before"])
        torch.compile(function, backend=backend, fullgraph=True)(torch.randn(5), torch.randn(2, 2))
    assert found == [None]


@pytest.mark.parametrize("told", [True, False])
def test_inputs_of_one_memory_are_left_to_one_trace(told: bool) -> None:
    table = torch.randn(4, 2)
    found: list[Any] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        for node in gm.graph.find_nodes(op="placeholder"):
            if not told and "table" not in node.name:
                del node.meta["example_value"]  # as of an input that Dynamo did not make
        found.append(traced_by_kind(gm, examples))
        return gm

    def run(x: Tensor, table: Tensor, shown: Tensor) -> Any:
        return layers_of(same, lambda x, one, other: one.add_(x), lambda one, other: other * 2)(x, table, shown)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(run, backend=backend, fullgraph=True)(torch.randn(5), table[:2], table[1:])
    assert found == [None]


def test_layers_of_an_exported_program() -> None:
    given = torch.randn(2, 1, 6), torch.randn(2, 5, 6)
    shapes = ({0: Dim("B", min=2)}, ({0: Dim("B", min=2), 1: Dim("T", min=2)},))
    exported = torch.export.export(Stack(Grown), given, dynamic_shapes=shapes)
    gm = exported.graph_module
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        ours, whole = traced_by_kind(gm, values), traced_once(gm, values)
    assert ours is not None
    assert whole is not None
    assert described(ours) == described(whole)
    weights = [exported.state_dict[spec.target] for spec in exported.graph_signature.input_specs if spec.target]
    torch.testing.assert_close(ours.gm(*weights, *given), whole.gm(*weights, *given), rtol=0, atol=0)


def test_what_a_graph_says_wrongly_of_a_value_is_not_believed() -> None:
    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        with torch.no_grad():
            assert traced_by_kind(gm, examples) is not None
            for node in gm.graph.find_nodes(op="call_function", target=operator.add):
                node.meta["example_value"] = node.meta["example_value"].double()
            assert traced_by_kind(gm, examples) is None
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Stack(), backend=backend, fullgraph=True)(torch.randn(2, 3, 6), torch.arange(3))


def test_a_size_is_neither_a_tensor_nor_another_number() -> None:
    """SymPy compares an expression with a tuple by converting what is in it, and fails for a type."""
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 3))
    size = fake.shape[0]
    assert isinstance(size, torch.SymInt)
    different = [fake, fake[:2], size, size + 1, 5, 5.0, None, True, (size, 5)]
    for k, one in enumerate(different):
        assert [known_of(one) == known_of(other) for other in different] == [n == k for n in range(len(different))]
    assert isinstance(size - size + 5, torch.SymInt)
    assert known_of(size - size + 5) == known_of(5)


def test_a_graph_without_layers_is_left_to_one_trace() -> None:
    ours, _ = traced(lambda x: (x * 2).sin().exp(), torch.randn(3))
    assert ours is None
