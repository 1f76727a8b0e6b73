"""One MLA with a cache kept in ways that change in every step: what Dynamo takes for constant, and what it does not.

``model(x)`` with x [B,S,D] continues where the last call ended. Everything is float64 and seeded; all sizes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, L, N, R, V = 14, 3, 8, 5, 4, 7
B, ROOM = 2, 64


class Rotary(nn.Module):
    """MLA by position; a subclass keeps the rows [latent, rotary key] of the tokens so far.

    Rotary parts are scaled by their positions instead of turned: what Dynamo takes for constant is the position alone,
    and each graph is traced with fewer operators.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        generator = torch.Generator().manual_seed(index)
        for name, rows, columns in (
            ("q", H * (N + R), D),
            ("down", L + R, D),
            ("up", H * (N + V), L),
            ("out", D, H * V),
        ):
            weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5
            setattr(self, name, nn.Parameter(weight))
        angles = torch.arange(ROOM, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
        self.register_buffer("cos", angles.cos())

    def project(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        S = x.shape[1]
        cos = self.cos[position : position + S]
        q_nope, q_rope = F.linear(x, self.q).view(B, S, H, N + R).transpose(1, 2).split([N, R], dim=-1)
        latent, k_rope = F.linear(x, self.down).split([L, R], dim=-1)
        return torch.cat([q_nope, q_rope * cos], -1), torch.cat([latent, k_rope * cos], -1)

    def attend(self, q: Tensor, rows: Tensor, position: int) -> Tensor:
        S, T = q.shape[2], rows.shape[1]
        latent, rope = rows.split([L, R], dim=-1)
        k, v = F.linear(latent, self.up).view(B, T, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
        mask = torch.arange(T)[None] <= torch.arange(S)[:, None] + position
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(o.transpose(1, 2).reshape(B, S, H * V), self.out)


class GrowingBuffer(Rotary):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.register_buffer("rows", torch.zeros(B, 0, L + R, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        position = self.rows.shape[1]
        q, new = self.project(x, position)
        self.rows = torch.cat([self.rows, new], dim=1)
        return self.attend(q, self.rows, position)


class ReadBeforeWritten(GrowingBuffer):
    """Attends to the tokens before these, and only then appends."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.rows = torch.ones(B, 2, L + R, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        position = self.rows.shape[1]
        q, new = self.project(x, position)
        y = self.attend(q, self.rows, position)
        self.rows = torch.cat([self.rows, new], dim=1)
        return y


class IntPosition(Rotary):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.position = 0
        self.register_buffer("rows", torch.zeros(B, ROOM, L + R, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        position, S = self.position, x.shape[1]
        q, new = self.project(x, position)
        self.rows[:, position : position + S] = new
        self.position += S
        return self.attend(q, self.rows[:, : self.position], position)


class Periodic(IntPosition):
    """Something else in every eighth step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.5 if self.position % 8 == 0 else x)


class ListOfTokens(Rotary):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.tokens: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        position = len(self.tokens)
        q, new = self.project(x, position)
        return self.attend(q, self.extended(new), position)

    def extended(self, new: Tensor) -> Tensor:
        self.tokens += new.unbind(1)
        return torch.stack(self.tokens, dim=1)


class ListOutOfSight(ListOfTokens):
    """As the warning about :class:`ListOfTokens` advises."""

    def forward(self, x: Tensor) -> Tensor:
        position = self.length()
        q, new = self.project(x, position)
        return self.attend(q, self.extended(new), position)

    @torch.compiler.disable
    def length(self) -> int:
        return len(self.tokens)

    extended = torch.compiler.disable(ListOfTokens.extended)


class ByIndex(Rotary):
    """Reads and writes the cache of its layer in an object that all layers share."""

    rows: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        position = self.rows[self.index].shape[1]
        q, new = self.project(x, position)
        self.rows[self.index] = torch.cat([self.rows[self.index], new], dim=1)
        return self.attend(q, self.rows[self.index], position)


class Layers(nn.Module):
    """``breaks``: with a graph break before each layer, so that all of them run one code."""

    def __init__(self, layer: Callable[[int], Rotary], count: int, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(count))
        self.breaks = breaks
        shared = [torch.zeros(B, 0, L + R, dtype=torch.float64) for _ in range(count)]
        for each in self.layers:
            if isinstance(each, ByIndex):
                each.rows = shared

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.one(layer, x)
        return x

    def one(self, layer: nn.Module, x: Tensor) -> Any:
        if self.breaks:
            torch._dynamo.graph_break()
        return layer(x)


def steps(count: int = 24, prompt: int = 5) -> list[Tensor]:
    """A prompt and ``count`` tokens."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(B, S, D, generator=generator, dtype=torch.float64) for S in (prompt, *[1] * count)]
