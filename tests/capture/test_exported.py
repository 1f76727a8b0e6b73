"""An exported program that was made functional in one trace is the program that torch makes, or is left to torch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mla_compile.capture import exported as capture


class Layer(nn.Module):
    """Writes to a buffer, an input and what it made, through views too; a constant; operators that stay whole."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, cache: Tensor, scale: float) -> dict[str, Any]:
        self.seen.add_(x[0])
        cache[:, :2].mul_(0.5)
        attended = nn.functional.scaled_dot_product_attention(x[None, None], cache[None, None], cache[None, None])
        y = self.linear(attended[0, 0]) * scale + torch.tensor([1.0, 2.0]).sum()
        y[1:].zero_()
        return {"y": y, "view": cache[:, 1:], "size": x.shape[0], "none": None}


class Chosen(nn.Module):
    """A size that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.nonzero(x[:, 0] > 0, as_tuple=True)
        torch._check(rows.shape[0] > 1)
        return x[rows].mul_(2).cumsum(0)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def both(exported: ExportedProgram) -> tuple[ExportedProgram | None, ExportedProgram]:
    gm = exported.graph_module
    return capture._in_one_trace(exported, copy.deepcopy(gm)), capture._decomposed(exported, copy.deepcopy(gm))


def operators(program: ExportedProgram) -> Counter[str]:
    """How often each occurs, but for sizes, which each trace asks for in other places, and ``detach`` of constants."""
    called = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for name in called if "sym_size" not in name and "detach" not in name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_the_program_that_torch_makes(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, given = Layer().eval(), (torch.randn(3, 8), torch.randn(7, 8), 0.5)
    shapes = {"x": {0: Dim("rows", min=3, max=99)} if dynamic else None, "cache": None, "scale": None}
    exported = torch.export.export(model, given, dynamic_shapes=shapes)
    text = str(exported)
    one, two = both(exported)
    assert one is not None
    assert str(exported) == text
    assert operators(one) == operators(two)
    assert [(spec.kind, spec.target) for spec in one.graph_signature.input_specs] == [
        (spec.kind, spec.target) for spec in two.graph_signature.input_specs
    ]
    assert [spec.kind for spec in one.graph_signature.output_specs] == [
        spec.kind for spec in two.graph_signature.output_specs
    ]
    assert one.range_constraints == two.range_constraints
    assert one.state_dict.keys() == two.state_dict.keys()
    assert one.module_call_graph[0].signature == exported.module_call_graph[0].signature
    for node in one.graph.find_nodes(op="placeholder"):
        assert node.name == node.target
    for rows in (3, 5) if dynamic else (3,):
        results = []
        for program in (one, two):
            module, (x, cache) = program.module(), (torch.ones(rows, 8), torch.ones(7, 8))
            results.append((module(x, cache, 0.5), cache, module.seen))
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_sizes_that_depend_on_values() -> None:
    exported = torch.export.export(Chosen(), (torch.randn(9, 4).abs(),))
    one, two = both(exported)
    assert one is not None
    assert list(one.range_constraints.values()) == list(two.range_constraints.values())
    x = torch.randn(9, 4)
    torch.testing.assert_close(one.module()(x), Chosen()(x), rtol=0, atol=0)


def test_tied_weights_are_told_apart() -> None:
    """Neither is written; each is read under its own name."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    exported = torch.export.export(Tied(), (torch.arange(3),))
    one, two = both(exported)
    assert one is not None
    assert str(one.graph) == str(exported.graph)
    torch.testing.assert_close(one.module()(torch.arange(3)), two.module()(torch.arange(3)), rtol=0, atol=0)


def test_every_value_is_noted() -> None:
    """Of what returns nothing, too: an assertion about a number that is read from a tensor."""

    class Cut(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            size = n.item()
            torch._check(size >= 2)
            torch._check(size <= 6)
            return x[:, :size]

    one, two = both(torch.export.export(Cut(), (torch.randn(2, 6), torch.tensor(5))))
    assert one is not None
    for program in (one, two):
        assert all("val" in node.meta for node in program.graph.nodes if node.op == "call_function")
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            program.module()(torch.randn(2, 6), torch.tensor(7))


def test_levels_of_torch_func_are_left_to_torch() -> None:
    class Each(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: row.cumsum(0) * 2)(x)

    one, two = both(torch.export.export(Each(), (torch.ones(2, 3),)))
    assert one is None
    assert torch.equal(two.module()(torch.ones(2, 3)), torch.tensor([[2.0, 4.0, 6.0]] * 2))


def test_graphs_within_the_graph_are_left_to_torch() -> None:
    exported = torch.export.export(Branches(), (torch.ones(3),))
    one, two = both(exported)
    assert one is None
    assert torch.equal(two.module()(-torch.ones(3)), torch.full((3,), -2.0))
