"""Which of Dynamo's graphs are looked at for an attention without a softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mla_compile.dynamo.candidates import has_attention, joined_by_a_function


def seen(fn: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.fx.GraphModule]:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm

    with torch.no_grad():
        torch.compile(fn, backend=keep)(*inputs)
    return graphs


Q, K, V = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 7, 6), torch.randn(2, 3, 7, 5)
FOUND: dict[str, Callable[..., torch.Tensor]] = {
    "operator": lambda q, k, v: (q @ k.mT * 0.3 - 1).sigmoid() @ v,
    "matmul": lambda q, k, v: torch.matmul(F.relu(torch.matmul(q, k.mT)) ** 2, v),
    "einsum": lambda q, k, v: torch.einsum("bhst,bhtv->bhsv", torch.einsum("bhsd,bhtd->bhst", q, k).square(), v),
    "bmm": lambda q, k, v: torch.bmm(F.silu(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)), v.flatten(0, 1)),
    "in place": lambda q, k, v: (q @ k.mT).relu_() @ v,
    "a method": lambda q, k, v: q.matmul(k.mT).clamp(min=0).matmul(v),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_function_between_two_products(name: str) -> None:
    (gm,) = seen(FOUND[name], Q, K, V)
    assert joined_by_a_function(gm.graph)
    assert has_attention(gm)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.a, self.b = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9, 6))
        self.router = nn.Parameter(torch.randn(6, 7))
        self.conv = nn.Conv1d(6, 6, 3, padding=1)


class Linears(Layers):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Parameters(Layers):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ self.a) @ self.b


class Routed(Layers):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ self.router).sigmoid() @ v


class Convolved(Layers):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(F.relu(self.conv(x.mT)))
        return out @ x


class ProductsAlone(Layers):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT) @ F.relu(x)


@pytest.mark.parametrize("kind", [Linears, Parameters, Routed, Convolved, ProductsAlone])
def test_what_most_models_have_is_not_captured(kind: type[Layers]) -> None:
    (gm,) = seen(kind(), torch.randn(2, 7, 6), torch.randn(2, 7, 5))
    assert not has_attention(gm)
