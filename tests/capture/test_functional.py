"""One trace gives the graph that torch's two give, or leaves it to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile.capture import functional
from mla_compile.capture.functional import Functional, functionalized


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[Functional | None, Functional]:
    """Both graphs of what Dynamo makes of a function."""
    found: list[tuple[Functional | None, Functional]] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        found.append(both(gm, list(examples)))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (graphs,) = found
    return graphs


def both(gm: fx.GraphModule, values: list[Any]) -> tuple[Functional | None, Functional]:
    """The graph of one trace, where that takes it, and the graph of ``aot_export_module``."""
    assert detect_fake_mode(values) is not None
    before = torch.get_rng_state()
    with torch.no_grad():
        graphs = functional.traced_once(gm, values), functional._by_aot_export(gm, values)
    assert torch.equal(torch.get_rng_state(), before)
    return graphs


def described(one: Functional) -> list[Any]:
    def value(node: fx.Node) -> object:
        of = node.meta.get("val")
        return (of.shape, of.stride(), of.dtype, of.device) if isinstance(of, Tensor) else type(of)

    return [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), str(value(node)),
         bool(node.meta.get("stack_trace")), str(node.meta.get("nn_module_stack")))
        for node in one.gm.graph.nodes
    ]  # fmt: skip


class Layer(nn.Module):
    """In-place writes of buffers and inputs, through views too, and operators that stay whole."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(3, 8))

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        self.seen.add_(x)
        cache[:, :2].mul_(0.5)
        cache.index_copy_(0, at, x[:1])
        attended = nn.functional.scaled_dot_product_attention(x[None, None], cache[None, None], cache[None, None])
        y = self.linear(attended[0, 0])
        y[1:].zero_()
        return y, cache[:, 1:], x.T, torch.where(y.sum(0) > 0, y, y.exp())


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_trace_gives_the_graph_of_two(dynamic: bool) -> None:
    one, two = traced(Layer(), torch.randn(3, 8), torch.randn(7, 8), torch.tensor([2]), dynamic=dynamic)
    assert one is not None
    assert one.written == two.written
    assert len(one.written) == 2
    assert described(one) == described(two)


def test_random_numbers_are_not_used_up() -> None:
    one, two = traced(lambda x: x + torch.rand_like(x), torch.randn(3, 8))
    assert one is not None
    assert described(one) == described(two)


def _views_of_one(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return y * 2


def test_inputs_that_share_memory_are_left_to_torch() -> None:
    base = torch.randn(4, 8)
    gm = fx.symbolic_trace(_views_of_one)
    mode = torch._subclasses.FakeTensorMode()
    whole = mode.from_tensor(base)
    with mode:
        views = [whole[:2], whole[1:3]]
    with torch.no_grad():
        assert functional.traced_once(gm, views) is None


def test_an_input_that_gets_another_shape_is_refused_by_torch() -> None:
    def resized(x: Tensor) -> Tensor:
        x.transpose_(0, 1)
        return x + 1

    gm, mode = fx.symbolic_trace(resized), torch._subclasses.FakeTensorMode()
    gm.graph.output_node().args = (gm.graph.output_node().args,)
    gm.recompile()
    values = [mode.from_tensor(torch.randn(3, 8))]
    with torch.no_grad():
        assert functional.traced_once(gm, values) is None
        with pytest.raises(RuntimeError, match="metadata mutation"):
            functionalized(gm, values)


def test_side_effects_are_left_to_torch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten._print.default, ("seen",))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, 1)),))
    mode = torch._subclasses.FakeTensorMode()
    one, two = both(fx.GraphModule({}, graph), [mode.from_tensor(torch.randn(3))])
    assert one is None
    assert two.tokens == 1


@pytest.mark.parametrize("value", [torch.float64, torch.eye(3).to_sparse()])
def test_values_that_are_neither_dense_tensors_nor_numbers_are_left_to_torch(value: object) -> None:
    assert not functional._is_plain(value)


def test_values_that_are_no_tensors_of_torch_are_left_to_torch() -> None:
    gm = fx.symbolic_trace(lambda x, dtype: (x.to(dtype),))
    mode = torch._subclasses.FakeTensorMode()
    with torch.no_grad():
        assert functional.traced_once(gm, [mode.from_tensor(torch.randn(3)), torch.float64]) is None
        assert functional.traced_once(gm, [torch.randn(3), 1.0]) is None  # real tensors: no sizes are known to be open


def test_a_size_that_becomes_constant_is_so_from_the_first_operator_on() -> None:
    graph = fx.Graph()
    x, whole = graph.placeholder("x"), graph.placeholder("whole")
    size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    count = graph.call_function(torch.ops.aten.arange.default, (size,))
    same = graph.call_function(torch.ops.aten.add.Tensor, (x, whole))  # of 5 rows
    graph.output((count, same))
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    values = [mode.from_tensor(torch.randn(5, 3)), mode.from_tensor(torch.randn(5, 3), static_shapes=True)]
    with torch.no_grad():
        result = functionalized(fx.GraphModule({}, graph), values)
    (arange,) = result.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)
    assert arange.args == (5,)


def test_streams_are_left_to_torch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    assert not functional._has_streams(graph)
    with graph.inserting_after(x):
        graph.call_function(torch.ops.streams.record_event.default, (0, 0))
    assert functional._has_streams(graph)
