"""One buffer of K and V for all layers, which the model owns, as public code keeps it: its layers become rows."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import mla_compile.backend
from mla_compile.runtime.latent import LatentTensor
from tests.support.tiers import also
from tests.zoo.base import CAPACITY, Buffered, Dims

DIMS = Dims()
LAYERS = 2  # tests/passes/cache/test_layers_of_one_buffer.py has one between others
EXACT = 1e-12
SHAPE = (DIMS.B, DIMS.H, CAPACITY, DIMS.N + DIMS.R)


class Keeper(nn.Module):
    """Layers that hand keys and values to the model's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Buffered(DIMS) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            layer.up.weight.data.mul_(1 + 0.1 * number)

    def forward(self, x: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[1])
        for number, layer in enumerate(self.layers):
            q, k, v = layer.step(x, positions)
            x = x + layer.over(q, *self.update(number, k, v, positions, start), positions)
        return x

    def update(self, layer: int, k: Tensor, v: Tensor, at: Tensor, start: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class OfLayers(Keeper):
    """K and V [LAYERS,B,H,T,D], as static caches for export have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(LAYERS, *SHAPE))
        self.register_buffer("v_cache", torch.zeros(LAYERS, *SHAPE[:3], DIMS.V))

    def update(self, layer: int, k: Tensor, v: Tensor, at: Tensor, start: int) -> tuple[Tensor, Tensor]:
        keys, values = self.k_cache[layer], self.v_cache[layer]
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        end = start + k.shape[2]
        return keys[:, :, :end], values[:, :, :end]


class OfBoth(Keeper):
    """One tensor [LAYERS,2,B,H,T,D]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(LAYERS, 2, *SHAPE))

    def update(self, layer: int, k: Tensor, v: Tensor, at: Tensor, start: int) -> tuple[Tensor, Tensor]:
        end = start + k.shape[2]
        self.kv_cache[layer, 0, :, :, start:end] = k
        self.kv_cache[layer, 1, :, :, start:end] = F.pad(v, (0, DIMS.N + DIMS.R - DIMS.V))
        return self.kv_cache[layer, 0, :, :, :end], self.kv_cache[layer, 1, :, :, :end, : DIMS.V]


class TokensFirst(Keeper):
    """K and V [LAYERS,B,T,H,D], written at one position after the other."""

    def __init__(self) -> None:
        super().__init__()
        b, h, t, wide = SHAPE
        self.register_buffer("k_cache", torch.zeros(LAYERS, b, t, h, wide))
        self.register_buffer("v_cache", torch.zeros(LAYERS, b, t, h, DIMS.V))

    def update(self, layer: int, k: Tensor, v: Tensor, at: Tensor, start: int) -> tuple[Tensor, Tensor]:
        end = start + k.shape[2]
        self.k_cache[layer, :, start:end] = k.transpose(1, 2)
        self.v_cache[layer, :, start:end] = v.transpose(1, 2)
        held = self.k_cache[layer, :, :end], self.v_cache[layer, :, :end]
        return held[0].transpose(1, 2), held[1].transpose(1, 2)


def caches(model: nn.Module) -> list[Tensor]:
    return [b for name, b in model.named_buffers() if "cache" in name]


@torch.inference_mode()
def steps(model: nn.Module, plain: nn.Module, counts: tuple[int, ...] = (4, 1, 1), start: int = 0) -> None:
    for count in counts:
        x = torch.randn(DIMS.B, count, DIMS.D, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
        got, expected = model(x, start), plain(x, start)
        assert (got - expected).abs().max() < EXACT
        start += count


@pytest.mark.parametrize("kind", [OfLayers, *also("combination", OfBoth, TokensFirst)])
def test_optimize_keeps_rows(kind: type[Keeper]) -> None:
    model = kind().double().eval()
    plain = copy.deepcopy(model)
    original = [StorageWeakRef(cache.untyped_storage()) for cache in caches(model)]
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    steps(fast, plain)
    report = fast.mla_report
    assert {s.code for s in report.sites[-LAYERS:]} == {"absorbed"}
    held = caches(fast)
    assert all(isinstance(cache, LatentTensor) and cache.recipe is not None for cache in held)
    rows = {id(row): row for cache in held for row in cache.shown_rows()}
    assert sum(row.numel() for row in rows.values()) == LAYERS * DIMS.B * CAPACITY * (DIMS.L + DIMS.R)
    for cache, one in zip(held, caches(plain), strict=True):
        assert (cache.expanded() - one).abs().max() < EXACT
    del model
    gc.collect()
    assert all(storage.expired() for storage in original)


@pytest.mark.parametrize("kind", [OfLayers, *also("combination", OfBoth, TokensFirst)])
def test_rows_beside_under_torch_compile(kind: type[Keeper]) -> None:
    model = kind().double().eval()
    plain = copy.deepcopy(model)
    steps(torch.compile(model, backend="mla", options={"codegen": "eager", "strict": True}), plain, (1,), 4)
    assert {s.code for s in mla_compile.backend.reports()[-1].sites} == {"absorbed"}
    for cache, one in zip(caches(model), caches(plain), strict=True):
        assert (cache - one).abs().max() < EXACT
