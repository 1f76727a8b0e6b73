"""Names of classes of torch in a trace, with which libraries recognise their own tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import GetAttrVariable

from mla_compile.dynamo.entry import compiled_entry


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class ByClass(Reads):
    def forward(self, x):
        return -x if type(self.weight).__module__.startswith("torchao.") else 2 * x


class ByFunction(Reads):
    """Near miss: a function's name is not that of a class."""

    def forward(self, x):
        return 2 * x if torch.add.__name__.startswith("add") else -x


def traced(module):
    graphs = []
    run = compiled_entry(lambda gm, _: graphs.append(gm) or gm, fullgraph=True)
    with torch.no_grad():
        return run(module, (torch.ones(2),), {}), len(graphs)


def test_the_name_of_a_class_is_read_and_torch_is_left_as_it_was():
    before = GetAttrVariable.call_method
    result, graphs = traced(ByClass())
    assert result.tolist() == [2, 2]
    assert graphs == 1
    assert GetAttrVariable.call_method is before


def test_other_names_are_read_as_torch_reads_them():
    before = GetAttrVariable.call_method
    try:
        torch.compile(ByFunction(), backend="eager", fullgraph=True)(torch.ones(2))
    except Unsupported:
        with pytest.raises(Unsupported):
            traced(ByFunction())
    else:
        assert traced(ByFunction())[0].tolist() == [2, 2]
    assert GetAttrVariable.call_method is before
