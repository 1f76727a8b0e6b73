"""Attention layers that keep K and V per head, and the ways in which people keep them.

``Model(style)(x, cache, start)`` runs two layers (or as many as asked for) over new tokens x [B,S,D] at positions from
``start`` on; the cache is a :class:`Cache` whose ``keys`` and ``values`` hold one tensor a layer. Weights are seeded,
sizes all differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.programs import seeded

B, H, N, R, V, L, D = 2, 3, 4, 2, 5, 6, 7
LAYERS = 2


class Cache:
    """Grows by ``cat`` along the tokens, as caches of Python code do."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def update(self, layer: int, k: Tensor, v: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
        old_k, old_v = self.keys[layer], self.values[layer]
        self.keys[layer] = k if old_k is None else torch.cat([old_k, k], dim)
        self.values[layer] = v if old_v is None else torch.cat([old_v, v], dim)
        return self.keys[layer], self.values[layer]


class TokenLists(Cache):
    """One tensor for every call, joined when they are read."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.keys = [[] for _ in range(layers)]
        self.values = [[] for _ in range(layers)]

    def update(self, layer: int, k: Tensor, v: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
        self.keys[layer].append(k)
        self.values[layer].append(v)
        return torch.cat(self.keys[layer], dim), torch.cat(self.values[layer], dim)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * (torch.arange(half, dtype=x.dtype) + 1) * 0.3
    cos, sin, a, b = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(self, number: int, style: str) -> None:
        super().__init__()
        self.number, self.style = number, style
        self.q = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.norm = nn.RMSNorm(L)
        self.up = nn.Linear(L, H * (N + V), bias=style == "bias")
        self.o = nn.Linear(H * V, D, bias=False)

    def forward(self, x: Tensor, cache: Cache, start: int) -> Tensor:
        b, s, _ = x.shape
        positions = torch.arange(start, start + s, dtype=x.dtype)
        q = self.q(x).view(b, s, H, N + R).transpose(1, 2)
        c, k_rope = self.down(x).split([L, R], -1)
        k_nope, v = self.up(self.norm(c)).view(b, s, H, N + V).transpose(1, 2).split([N, V], -1)
        k_rope = k_rope.view(b, 1, s, R)
        k_rope = rotated(k_rope.expand(b, H, s, R) if self.style == "copied_first" else k_rope, positions)
        q = torch.cat([q[..., :N], rotated(q[..., N:], positions)], -1)
        k = self.joined(k_nope, k_rope)
        if self.style == "rope_on_keys":
            k = torch.cat([rotated(k[..., :N], positions), k[..., N:]], -1)
        if self.style == "heads_last":
            k, v = cache.update(self.number, k.transpose(1, 2), v.transpose(1, 2), 1)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = cache.update(self.number, k, v)
        t = k.shape[2]
        mask = torch.full((s, t), float("-inf"), dtype=x.dtype).triu(t - s + 1)
        if self.style == "written_out":
            y = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(y.transpose(1, 2).reshape(b, s, H * V))

    def joined(self, k_nope: Tensor, k_rope: Tensor) -> Tensor:
        b, _, s, _ = k_nope.shape
        if self.style != "assigned":
            return torch.cat([k_nope, k_rope.expand(b, H, s, R)], -1)
        k = k_nope.new_empty(b, H, s, N + R)
        k[..., :N] = k_nope
        k[..., N:] = k_rope
        return k


class Model(nn.Module):
    def __init__(self, style: str = "plain", layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, style) for i in range(layers))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = seeded(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, cache: Cache, start: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache, start)
        return x


class OneLayer(nn.Module):
    """K and V as arguments and results: ``x, (k, v) -> y, (k, v)``, or ``x -> y, (k, v)`` for a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Model().layers[0]

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        cache = Cache()
        if past is not None:
            cache.keys[0], cache.values[0] = past
        y = self.layer(x, cache, 0)
        return y, (cache.keys[0], cache.values[0])
