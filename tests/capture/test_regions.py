"""A part of a graph is replaced by the operators that it runs, wherever its nodes stand."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.capture.regions import write_out

aten = torch.ops.aten


def test_operators_take_the_place_of_the_last_node_and_read_objects_as_they_are() -> None:
    """Another node between those of the region makes an input of its last; a tuple is no operand of the trace."""
    graph, fake = fx.Graph(), FakeTensorMode()

    def noted(node: fx.Node, value: Any) -> fx.Node:
        node.meta["example_value"] = value
        return node

    with fake:
        example, other = torch.ones(2, 3), torch.ones(2, 3)
    x, dims = noted(graph.placeholder("x"), example), noted(graph.placeholder("dims"), (1, 0))
    first = noted(graph.call_function(torch.permute, (x, dims)), example.t())
    between = noted(graph.call_function(torch.sin, (x,)), other)
    last = noted(graph.call_function(torch.matmul, (first, between)), torch.empty(3, 3))
    graph.output((last,))
    gm = fx.GraphModule({}, graph)
    nodes = list(gm.graph.nodes)
    write_out(gm, [nodes[2], nodes[4]])
    gm.graph.lint()
    gm.recompile()
    value = torch.arange(6.0).view(2, 3)
    assert torch.equal(gm(value, None)[0], value.t() @ value.sin())
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        torch.sin,
        aten.permute.default,
        aten.mm.default,
    ]
