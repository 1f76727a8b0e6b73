"""Where a graph repeats itself, on small graphs of calls that nobody would fuse or reorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.repeats import find
from mla_compile.repeats.find import cut, form


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "LEAST_LENGTH", 3)


def steps(function: Any, *inputs: Any) -> list[fx.Node]:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def lengths(found: list[list[Any]]) -> list[list[int]]:
    return [[len(part) for part in stretch] for stretch in found]


def layer(x: Tensor, scale: float = 2.0) -> Tensor:
    y = torch.sin(x) * scale
    return x + torch.exp(y)  # sin, mul, exp, add


def layers(*scales: float, before: int = 1, behind: int = 2) -> list[fx.Node]:
    def run(x: Tensor) -> Tensor:
        for _ in range(before):
            x = torch.tanh(x)
        for scale in scales:
            x = layer(x, scale)
        for _ in range(behind):
            x = torch.abs(x)
        return x

    return steps(run, torch.ones(3))


def test_layers_are_cut_where_one_tensor_is_handed_on() -> None:
    assert lengths(cut(layers(2.0, 2.0, 2.0, 2.0))) == [[1], [4, 4, 4, 4], [2]]
    assert lengths(cut(layers(2.0, 2.0, 2.0, before=0, behind=0))) == [[4, 4, 4]]


def test_two_layers_are_no_repetition() -> None:
    assert lengths(cut(layers(2.0, 2.0))) == [[11]]
    assert cut([]) == []


@pytest.mark.parametrize("other", [3.0, 2, True, float("nan")], ids=str)
def test_a_layer_with_another_number_is_none_of_them(other: Any) -> None:
    found = cut(layers(*[2.0] * 4, other, *[2.0] * 3, before=0, behind=0))
    assert lengths(found) == [[4] * 4, [4], [4] * 3]


@pytest.mark.parametrize("number", [1, True, 1.0, float("nan"), float("inf")], ids=str)
def test_layers_with_the_same_number_are_alike(number: Any) -> None:
    assert lengths(cut(layers(*[number] * 3, before=0, behind=0))) == [[4] * 3]


def test_kinds_that_take_turns_repeat_together() -> None:
    assert lengths(cut(layers(2.0, 3.0, 2.0, 3.0, 2.0, 3.0))) == [[1], [8, 8, 8], [2]]


def test_one_kind_behind_the_other() -> None:
    assert lengths(cut(layers(*[2.0] * 3, *[3.0] * 5))) == [[1], [4] * 3, [4] * 5, [2]]


def test_a_layer_of_another_width_is_none_of_them() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x)
        x = x @ w
        for _ in range(3):
            x = layer(x)
        return x

    assert lengths(cut(steps(run, torch.ones(3, 3), torch.ones(3, 5)))) == [[4] * 3, [1], [4] * 3]


def test_forms_are_equal_where_the_same_is_read_in_the_same_places() -> None:
    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x * a + a
        x = x * b + b
        x = x * a + b
        return x * x + a

    calls = steps(run, *(torch.ones(3) for _ in range(3)))
    (first, given), (second, _), (third, _), (fourth, _) = (form(calls[i : i + 2]) for i in (0, 2, 4, 6))
    assert first == second
    assert [node.name for node in given] == ["x_1", "a_1"]
    assert len({first, third, fourth}) == 3


def test_forms_differ_where_an_input_lies_otherwise_in_memory() -> None:
    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return x * a * b.t() * c * d

    calls = steps(run, *(torch.ones(3, 3) for _ in range(4)), torch.ones(1, 3))
    products = [form([node])[0] for node in calls if "mul" in node.name]
    assert products[0] != products[1]  # b is transposed
    assert products[0] == products[2]
    assert products[0] != products[3]  # d is smaller


def test_views_of_a_tensor_at_different_places_are_not_alike() -> None:
    def run(x: Tensor) -> Tensor:
        return x[0:2] * x[2:4]

    first, second = (node for node in steps(run, torch.ones(4)) if "slice" in node.name)
    assert form([first])[0] != form([second])[0]
