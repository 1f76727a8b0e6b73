"""Rows that a cache holds: they are there however few heads read them, so only the work is compared."""

from __future__ import annotations

import warnings

import pytest
import torch

import mla_compile
from mla_compile.codes import Code
from mla_compile.runtime.latent import LatentTensor
from tests.support import latent_modules
from tests.support.modules import MLA, D, H, N, V
from tests.support.programs import assert_equal, codes, export, optimized, refused, seeded
from tests.support.tiers import also

pytestmark = pytest.mark.thorough


class Cached(MLA):
    """The new rows stand behind those of the cache."""

    def joined(self, old, new):
        return torch.cat([old, new], 1)

    def forward(self, x, c, r, new_c, new_r):
        return super().forward(x, self.joined(c, new_c), self.joined(r, new_r))


class Normed(Cached):
    def latent(self, c):
        return c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Buffered(Cached):
    def joined(self, old, new):
        return old.index_copy(1, torch.arange(3, 3 + new.shape[1]), new)


def given(S, L, R, T=9):
    return [seeded(2, S, D), *(seeded(2, n, w, seed=k) for k, (n, w) in enumerate([(T, L), (T, R), (S, L), (S, R)]))]


@pytest.mark.singly
@pytest.mark.parametrize("kind", [Cached, Buffered, *also("combination", Normed)])
@pytest.mark.parametrize("heads", [1, 2, *also("combination", 3)])
def test_few_heads_on_wide_rows(kind, heads):
    L, R = 2 * heads * (N + V), 4
    module, data = kind(H=heads, L=L), given(1, L, R)
    outcome = optimized(export(module, data))
    assert codes(outcome) == [Code.ABSORBED]
    assert_equal(module, outcome.program, data)


@pytest.mark.parametrize(("heads", "before", "after"), [(2, 525_568, 4_352), (1, 262_784, 2_176)])
def test_a_rank_of_deepseek_with_one_or_two_heads(heads, before, after):
    """V2-Lite on 8 ranks, V3 on 64: as many values are made as the latent has, or fewer."""
    sizes = {"H": heads, "L": 512, "N": 128, "R": 64, "V": 128}
    (site,) = optimized(export(Cached(**sizes), given(1, 512, 64))).report.sites
    assert site.code is Code.ABSORBED
    assert (site.decode_flops_before, site.decode_flops_after) == (before, after)


def test_many_queries_expand_all_the_same():
    L = 2 * H * (N + V)
    module, data = Cached(L=L), given(64, L, 4)
    assert codes(optimized(export(module, data))) == [Code.COST_PREFILL]


def test_rows_that_come_in_whole_may_be_anything():
    L = 2 * H * (N + V)
    refused(MLA(L=L), [seeded(2, 1, D), seeded(2, 9, L), seeded(2, 9, 4)], Code.COST_LATENT_WIDE)


def test_a_cache_of_k_and_v_does_not_grow(monkeypatch):
    """Legal, and rows would be wider than the K and V in their place."""
    monkeypatch.setattr(latent_modules, "L", latent_modules.H * 12)
    model = latent_modules.Model(layers=1)
    fast, cache = mla_compile.optimize(model, codegen="eager"), latent_modules.Cache(1)
    for start, count in ((0, 5), (5, 1)):
        x = seeded(2, count, latent_modules.D, seed=start)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", mla_compile.MlaCompileWarning)  # that nothing was absorbed
            fast(x, cache, start)
    assert not any(isinstance(k, LatentTensor) for k in cache.keys)
