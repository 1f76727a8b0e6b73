"""Equal values are equal computations, and a constant is part of what is computed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mla_compile.passes.verify.computation import Computations


def computed(constant: torch.Tensor, *, known: bool = False) -> object:
    graph = fx.Graph()
    x, held = graph.placeholder("x"), graph.get_attr("held")
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, held))
    graph.output(node)
    module = fx.GraphModule({"held": constant}, graph)
    for one in (x, held, node):
        one.meta["val"] = torch.empty(3, device="meta")
    found = next(n for n in module.graph.nodes if n.op == "call_function")
    return Computations({}, {"held": constant} if known else {}, {}).of(found)


@pytest.mark.parametrize("size", [3, 100])
def test_constants_are_told_apart_and_weights_are_not(size):
    one, other = torch.zeros(size), torch.ones(size)
    assert computed(one) == computed(one)
    assert computed(one) != computed(other)
    assert computed(one, known=True) == computed(other, known=True)
