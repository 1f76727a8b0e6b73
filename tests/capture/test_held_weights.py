"""Which tensors in plain attributes of modules are weights: told by what a graph does with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.capture.capture import from_dynamo
from mla_compile.core.program import Program

H, N, V, L, D, B, T = 2, 3, 3, 4, 6, 2, 4
"""As many tokens as a row is wide and as many sequences as heads: sizes tell nothing apart."""


class Holder(nn.Module):
    """Calls ``what(self, x)``; ``held``: its plain attribute."""

    def __init__(self, what: Callable[[Any, Tensor], Any], held: Any) -> None:
        super().__init__()
        self.what, self.held = what, held
        self.down, self.up = nn.Linear(D, L, bias=False), nn.Linear(L, H * N, bias=False)
        self.q = nn.Linear(D, H * N, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        return self.q(x).unflatten(-1, (H, N)).transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


def captured(what: Callable[[Any, Tensor], Any], held: Any) -> Program:
    programs: list[Program] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        programs.append(from_dynamo(gm, inputs))
        return gm

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(Holder(what, held), backend=backend, fullgraph=True)(torch.randn(B, T, D))
    (program,) = programs
    return program


def is_weight(what: Callable[[Any, Tensor], Any], held: Tensor) -> bool:
    return any(value is held for value in captured(what, held).weights.values())


def made_of_heads(m: Holder, x: Tensor) -> Tensor:
    k = torch.einsum("btl,hnl->bhtn", m.down(x), m.held)
    return F.scaled_dot_product_attention(m.queries(x), k, k)


def written_out(m: Holder, x: Tensor) -> Tensor:
    c = m.down(x)
    k = (c[:, None] @ m.held.transpose(-1, -2)[None]).contiguous()
    return (m.queries(x) @ k.mT).softmax(-1) @ k


def in_two_formats(m: Holder, x: Tensor) -> Tensor:
    weight = (m.held.to(torch.bfloat16).float() * 2).reshape(H * N, L)
    return F.linear(m.down(x), weight)


def absorbed_by_hand(m: Holder, x: Tensor) -> Tensor:
    c = m.down(x)
    p = (m.queries(x) @ m.held @ c[:, None].mT).softmax(-1)
    return (p @ c[:, None]) @ m.held.mT


@pytest.mark.parametrize("use", [made_of_heads, written_out, in_two_formats, absorbed_by_hand])
def test_rows_of_the_call_are_multiplied_with_weights(use):
    assert is_weight(use, torch.randn(H, N, L))


def of_heads_by_feature(m: Holder, x: Tensor) -> Tensor:
    k = m.up(m.down(x)) * (m.up.weight.sum(1) / m.held)
    return m.queries(x) @ k.unflatten(-1, (H, N)).transpose(1, 2).mT


def by_feature(m: Holder, x: Tensor) -> Tensor:
    return m.up(m.down(x)) * m.held.view(1, -1)


@pytest.mark.parametrize("use", [of_heads_by_feature, by_feature])
def test_features_are_multiplied_with_weights(use):
    assert is_weight(use, torch.randn(H * N))


def scored_by_feature(m: Holder, x: Tensor) -> Tensor:
    return (m.up(m.down(x)) * m.held).sum(-1).softmax(-1)


def weighed_by_feature(m: Holder, x: Tensor) -> Tensor:
    return m.up(m.down(x)).softmax(-1) * m.held


def added(m: Holder, x: Tensor) -> Tensor:
    return m.up(m.down(x)) * m.held + m.held


@pytest.mark.parametrize("use", [scored_by_feature, weighed_by_feature, added])
def test_a_vector_of_other_use_is_no_weight(use):
    assert not is_weight(use, torch.randn(H * N))


@pytest.mark.parametrize("sizes", [(B, T, H * N), (B, 1, H * N), (T, 1), (1,)])
def test_what_multiplies_rows_apart_is_no_weight(sizes):
    assert not is_weight(lambda m, x: m.up(m.down(x)) * m.held, torch.randn(sizes))


@pytest.mark.parametrize("where", ["object", "dict", "list"])
def test_weights_lie_in_what_a_module_holds(where):
    weight = torch.randn(H, N, L)
    held, get = {
        "object": (SimpleNamespace(w=weight), lambda held: held.w),
        "dict": ({"w": weight}, lambda held: held["w"]),
        "list": ([weight], lambda held: held[0]),
    }[where]
    program = captured(lambda m, x: torch.einsum("btl,hnl->bhtn", m.down(x), get(m.held)), held)
    assert any(value is weight for value in program.weights.values())


def joined(m: Holder, x: Tensor) -> Tensor:
    return torch.cat([m.held, m.down(x)], 1) @ m.up.weight.T


def written_in_place(m: Holder, x: Tensor) -> Tensor:
    m.held[:, :T] = m.down(x)
    return m.down(x) @ m.held.mT


def written_through_a_view(m: Holder, x: Tensor) -> Tensor:
    m.held.view(B, T * L).mul_(2)
    return m.down(x) @ m.held


def multiplied_and_returned(m: Holder, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.down(x) @ m.held.mT, m.held[:, :1]


def expanded_by_a_parameter(m: Holder, x: Tensor) -> Tensor:
    k = m.up(m.held).unflatten(-1, (H, N)).transpose(1, 2)
    return F.scaled_dot_product_attention(m.queries(x), k, k)


def scored(m: Holder, x: Tensor) -> Tensor:
    scores = m.down(x) @ m.held.mT * 0.5
    return torch.where(scores > 9, 0.0, scores).softmax(-1)


def scored_by_exponentials(m: Holder, x: Tensor) -> Tensor:
    weights = (m.down(x) @ m.held.mT).exp()
    return weights / weights.sum(-1, keepdim=True)


def weighed(m: Holder, x: Tensor) -> Tensor:
    return F.dropout((m.down(x) @ m.down(x).mT).softmax(-1), 0.0) @ m.held


def weighed_at_once(m: Holder, x: Tensor) -> Tensor:
    return (m.down(x) @ m.down(x).mT).softmax(-1) @ m.held


def attended_to(m: Holder, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.down(x), m.held, m.held)


def also_added_to_rows(m: Holder, x: Tensor) -> Tensor:
    return m.down(x) @ m.held + m.held


CACHES = [
    joined, written_in_place, written_through_a_view, multiplied_and_returned, expanded_by_a_parameter, scored,
    scored_by_exponentials, weighed, weighed_at_once, attended_to, also_added_to_rows,
]  # fmt: skip


@pytest.mark.parametrize("use", CACHES)
def test_what_is_used_as_rows_is_no_weight(use):
    assert not is_weight(use, torch.randn(B, T, L))


def test_arguments_and_tensors_of_several_sizes_are_no_weights():
    rows = torch.randn(H, N, L)
    torch._dynamo.mark_dynamic(rows, 1)
    assert not is_weight(lambda m, x: torch.einsum("btl,hnl->bhtn", m.down(x), m.held), rows)
    assert not is_weight(lambda m, x: m.down(x) @ x[0, :L, :L], rows)
