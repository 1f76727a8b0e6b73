"""What values the numeric check draws, and in which precision it computes with them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.verify.evaluate import Evaluation, draw
from tests.support.programs import trace


def evaluated(graph: fx.Graph, value: Tensor) -> Tensor:
    """The result of a graph of one input, in float64."""
    (given,), (result,) = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
    given.meta[ORIGIN] = given.name
    return Evaluation({}, {given.name: value}, {}, 0, torch.float64).value(result)


def test_masks_are_padded_on_either_side_or_nowhere_or_hide_all():
    """A rewrite that is wrong for one of these alone would pass with masks of another kind."""
    mask = fx.Graph().placeholder("mask")
    mask.meta["val"] = torch.ones(8, 40, dtype=torch.bool)
    found = Counter[tuple[bool, bool, bool]]()
    for seed in range(20):
        for row in draw(mask, {}, 1.0, torch.Generator().manual_seed(seed)).int().tolist():
            if sum(a != b for a, b in pairwise([0, *row, 0])) <= 2:  # one range, and not random tokens
                found[bool(row[0]), bool(row[-1]), any(row)] += 1
    kinds = [(True, True, True), (True, False, True), (False, True, True), (False, False, True), (False, False, False)]
    assert all(found[kind] >= 4 for kind in kinds), found


def test_the_largest_number_of_a_dtype_is_no_overflow_of_a_cast_to_it():
    largest = torch.finfo(torch.float16).max
    numbers = torch.tensor([largest, -largest, 2 * largest, -2 * largest, 1.0])
    program = trace(lambda x: x.to(torch.float16), [numbers], [])
    assert evaluated(program.gm.graph, numbers).tolist() == [largest, -largest, math.inf, -math.inf, 1.0]


class Reordered(nn.Module):
    """Has a constant of whole numbers, and one that float32 rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.register_buffer("third", torch.tensor(1 / 3))

    def forward(self, x: Tensor) -> Any:
        return x[self.order] * self.third


def test_functions_that_an_operator_calls_run_in_the_wide_precision_and_keep_their_indices():
    graph = fx.Graph()
    function, x = graph.get_attr("function"), graph.placeholder("x")
    called = graph.call_function(lambda function, x: function(x), (function, x))
    graph.output((called,))
    for node in (x, called):
        node.meta["val"] = torch.ones(3)
    inner = Reordered()
    module = fx.GraphModule({"function": fx.symbolic_trace(inner)}, graph)
    value = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert torch.equal(evaluated(module.graph, value), inner.double()(value))
