"""What a graph says of memory: which nodes are views, and of what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.core.program import view_source


@pytest.mark.parametrize(
    ("function", "sources"),
    [
        (lambda x: x.t(), ["x_1"]),
        (lambda x: x.t()[0], ["x_1", "t"]),
        (lambda x: x.split(1)[1], ["x_1", "split", "split"]),
        (lambda x: x.sin(), [None]),
        (lambda x: x.max(0)[0], [None, None, None]),  # a tuple of no views
        (lambda x: x.add_(1), [None]),  # a write returns the tensor itself
    ],
)
def test_a_view_is_one_of_the_tensor_that_the_operator_takes(
    function: Callable[[Tensor], Tensor], sources: list[str | None]
) -> None:
    graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 3)).graph
    found = [view_source(node) for node in graph.nodes if node.op == "call_function"]
    assert [source and source.name for source in found] == sources
