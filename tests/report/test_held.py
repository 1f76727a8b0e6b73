"""What a report says that the caches hold is what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile.core.cache_argument import cache_of
from mla_compile.runtime.latent import held_bytes
from tests.support import models
from tests.support.tiers import full

H, L, N, V = 4, 16, 8, 6


class Keeps(nn.Module):
    """An attention whose caller keeps K and V of every head, or the latent of which they are made."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(24, H * N), nn.Linear(24, L)
        self.k, self.v = nn.Linear(L, H * N, bias=False), nn.Linear(L, H * V, bias=False)
        self.latents = what == "latents"

    def forward(self, x: Tensor, past: Any = None) -> Any:
        c = self.down(x)
        if self.latents:
            c = c if past is None else torch.cat([past[0], c], 1)
            return F.scaled_dot_product_attention(*map(self.heads, (self.q(x), self.k(c), self.v(c)))), (c,)
        k, v = self.heads(self.k(c)), self.heads(self.v(c))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return F.scaled_dot_product_attention(self.heads(self.q(x)), k, v), (k, v)

    def heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (H, -1)).transpose(1, 2)


@pytest.mark.parametrize(("what", "before"), [("keys and values", H * (N + V)), ("latents", L)])
@torch.no_grad()
def test_what_a_caller_keeps(what: str, before: int) -> None:
    model = Keeps(what).eval()
    fast = mla_compile.optimize(model, codegen="eager")
    held = []
    for one in (model, fast):
        _, cache = one(torch.randn(1, 5, 24))
        _, cache = one(torch.randn(1, 1, 24), cache)
        held.append(held_bytes(cache) // (6 * 4))
    assert held == [before, L]
    steps = [site for site in fast.mla_report.sites if site.values_held_after is not None]
    assert {(site.values_held_before, site.values_held_after) for site in steps} == {tuple(held)}
    assert {(site.values_read_before, site.values_read_after) for site in steps} == {(H * (N + V), L)}
    assert f"the cache holds {before} -> {L} values per token" in fast.mla_report.summary()


@full("family")
def test_what_a_cache_of_transformers_keeps() -> None:
    """It keeps the latent itself: what is read falls, and what is held does not."""
    model = models.build("deepseek_v2")
    fast = mla_compile.optimize(model, codegen="eager")
    held = []
    for one in (model, fast):
        done = one.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        cache = cache_of(done)
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        held.append(held_bytes(tensors) // (cache.get_seq_length() * 4))
    assert held[0] == held[1]
    assert f"the cache holds {held[0]} -> {held[1]} values per token" in fast.mla_report.summary()
