"""What is emitted in place of a captured graph: its interface, and when it writes to its inputs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.capture.capture import from_graph_module
from mla_compile.capture.emit import to_graph_module, to_plain_graph_module
from mla_compile.passes.cache.append import append_in_place
from tests.support.programs import seeded

aten = torch.ops.aten
B, T, S, W = 2, 5, 1, 3


class WithDefault(nn.Module):
    def forward(self, x: Tensor, shift: Tensor = None) -> tuple[Tensor]:  # type: ignore[assignment]
        return (x + shift,)


def test_names_and_defaults_of_inputs_stay() -> None:
    gm = fx.symbolic_trace(WithDefault())
    emitted = to_plain_graph_module(from_graph_module(gm, (torch.ones(2), torch.ones(2))))
    kept = inspect.signature(emitted.forward).parameters.values()
    assert [(one.name, one.default) for one in kept] == [("x", inspect.Parameter.empty), ("shift", None)]
    assert emitted(torch.ones(2), shift=torch.ones(2))[0].tolist() == [2, 2]


def attend(rows: Tensor, query: Tensor) -> Tensor:
    return (query @ rows.transpose(1, 2)).softmax(-1) @ rows


def grows(past: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    rows = torch.cat([past, new], 1)
    return rows, attend(rows, new)


def one_begins(past: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    first = torch.cat([torch.empty(0, dtype=new.dtype), new * 2], -2)
    rows = torch.cat([past, new], 1)
    return first, rows, attend(rows, new) + attend(first, new)


@pytest.mark.parametrize(("function", "caches"), [(grows, 1), (one_begins, 2)])
def test_rows_that_are_appended_are_written_alone(function: Callable[..., tuple[Tensor, ...]], caches: int) -> None:
    """Nothing makes or copies the whole cache, in whatever order caches begin and grow."""
    past, new = seeded(B, T, W), seeded(B, S, W, seed=1)
    program = from_graph_module(make_fx(function, tracing_mode="fake", pre_dispatch=True)(past, new), (past, new))
    assert append_in_place(program) == caches
    graph = to_graph_module(program).graph
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert write.args[0].meta["val"].shape == (B, S, W)
    assert not graph.find_nodes(op="call_function", target=aten.slice_scatter.default)


def test_an_input_that_keeps_its_value_is_not_written() -> None:
    x = torch.ones(2)
    traced = make_fx(lambda x: (x, x * 2), tracing_mode="fake")(x)
    program = dataclasses.replace(from_graph_module(traced, (x,)), mutations=("x_1",))
    emitted = to_graph_module(program)
    assert emitted(x)[0].tolist() == [2, 2]
    assert not emitted.graph.find_nodes(op="call_function", target=aten.copy_.default)
