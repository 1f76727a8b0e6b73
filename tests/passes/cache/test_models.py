"""Models that keep K and V per head: optimized, their caches hold rows, and nobody can tell from the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.errors import MlaCompileWarning
from mla_compile.runtime.latent import LatentTensor
from tests.support.latent_modules import B, Cache, D, H, L, Model, N, R, TokenLists, V
from tests.support.programs import seeded
from tests.support.tiers import full

pytestmark = pytest.mark.thorough

EXACT = 1e-12


@pytest.fixture(autouse=True)
def _no_grad():
    torch.compiler.reset()
    with torch.no_grad():
        yield


def compiled(model: nn.Module, door: str = "optimize", **options):
    options = {"codegen": "eager", "strict": True, **options}
    if door == "optimize":
        return mla_compile.optimize(model, **options)
    return torch.compile(model, backend="mla", options=options)


def compare(model, fast, cache=Cache, calls=(4, 1, 1), batch=B):
    """Runs both side by side; returns their caches."""
    mine, theirs, start = cache(len(model.layers)), cache(len(model.layers)), 0
    for number, count in enumerate(calls):
        x = seeded(batch, count, D, seed=number)
        expected, got = model(x, mine, start), fast(x, theirs, start)
        assert (got - expected).abs().max() < EXACT, f"call {number}"
        start += count
    return mine, theirs


def tensors(cache):
    return [*cache.keys, *cache.values]


def stored(cache) -> int:
    """Values that a cache really holds."""
    rows = {id(r): r for t in tensors(cache) for r in t.rows()}
    return sum(r.numel() for r in rows.values())


def holds_rows(model, fast, calls):
    """Compares both over these calls, and what their caches hold."""
    mine, theirs = compare(model, fast, calls=calls)
    for expected, got in zip(tensors(mine), tensors(theirs), strict=True):
        assert isinstance(got, LatentTensor)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < EXACT
    assert stored(theirs) == B * sum(calls) * (L + R)
    assert sum(t.numel() for t in tensors(mine)) == B * sum(calls) * H * (N + R + V)
    assert all(site.code in ("absorbed", "cost_prefill") for site in fast.mla_report.sites)


@full("combination")  # the plain style, with more calls: tests/passes/cache/test_other_readers.py
@pytest.mark.parametrize("style", ["bias", "heads_last", "assigned", "written_out", "copied_first"])
def test_the_cache_holds_rows_and_the_numbers_stay(style):
    model = Model(style, layers=1)
    fast = compiled(model)
    holds_rows(model, fast, (4, 1, 1))
    assert fast.mla_report.absorbed == 1


class Backwards(Cache):
    """Hands out the tokens in another order, picked by their positions."""

    def update(self, layer, k, v, dim=2):
        k, v = super().update(layer, k, v, dim)
        order = torch.arange(k.shape[2] - 1, -1, -1)
        return k[:, :, order], v.index_select(2, order)


def test_tokens_that_are_picked_of_a_cache_are_picked_of_its_rows():
    model = Model(layers=1)
    fast = compiled(model, forms="absorbed")
    _mine, theirs = compare(model, fast, Backwards, (4, 1, 1))
    assert stored(theirs) == B * 6 * (L + R)
    assert fast.mla_report.sites[-1].code == "absorbed"


@full("combination")
def test_by_the_backend_too():
    model = Model(layers=1)
    _, theirs = compare(model, compiled(model, "backend"), calls=(4, 1))
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


@full("inductor")
def test_through_inductor_and_without_our_op():
    model = Model(layers=1)
    compare(model, compiled(model, codegen="inductor", lowering="aten"))


def test_a_list_of_tokens_is_joined_in_rows():
    model = Model(layers=1)
    mine, theirs = compare(model, compiled(model, forms="absorbed"), TokenLists, calls=(3, 1))
    for own, other in zip(tensors(mine), tensors(theirs), strict=True):
        assert all(isinstance(t, LatentTensor) for t in other)
        assert all((a - b).abs().max() < EXACT for a, b in zip(own, other, strict=True))


@full("combination")
@pytest.mark.filterwarnings("ignore:nothing was absorbed")  # in the first call, where there is nothing to save
def test_a_prompt_of_one_token_and_a_batch_of_one():
    model = Model(layers=1)
    _, theirs = compare(model, compiled(model), calls=(1, 1, 1, 3), batch=1)
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_the_option_that_leaves_caches_alone():
    model = Model(layers=1)
    with pytest.warns(MlaCompileWarning, match="expanded_cache"):
        _, theirs = compare(model, compiled(model, cache="expanded"), calls=(3, 1))
    assert not any(isinstance(t, LatentTensor) for t in tensors(theirs))


@full("combination")
def test_keys_rotated_after_the_projection_are_kept_as_they_are():
    model = Model("rope_on_keys", layers=1)
    with pytest.warns(MlaCompileWarning):
        _, theirs = compare(model, compiled(model), calls=(3, 1, 1))
    assert not any(isinstance(t, LatentTensor) for t in theirs.keys)


def test_a_cache_filled_by_the_original_is_continued_as_it_is():
    model = Model(layers=1)
    fast = compiled(model)
    mine, theirs = Cache(1), Cache(1)
    x = seeded(B, 4, D, seed=1)
    model(x, mine, 0), model(x, theirs, 0)
    with pytest.warns(MlaCompileWarning, match="expanded_cache"):
        got = fast(x, theirs, 4)
    assert (got - model(x, mine, 4)).abs().max() < EXACT


def test_hidden_states_are_no_latent():
    """MHA without RoPE caches what is linear in its hidden state; kept instead, that would be expanded in each call."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList(nn.Linear(D, H * V, bias=False).double() for _ in range(3))])

        def forward(self, x, cache, start):
            b, s, _ = x.shape
            q, k, v = (w(x).view(b, s, H, V).transpose(1, 2) for w in self.layers[0])
            k, v = cache.update(0, k, v)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).reshape(b, s, H * V)

    model = Plain().eval().requires_grad_(False)
    with pytest.warns(MlaCompileWarning, match="not Multi-head Latent Attention"):
        mine, theirs = compare(model, compiled(model), calls=(3, 1, 1))
    assert type(theirs.keys[0]) is type(mine.keys[0]) is torch.Tensor


def test_rows_are_no_memory_of_anybody_else():
    """K is what the call returned, whatever becomes of the latent it was made from."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(L, H * V, bias=False).double()

        def forward(self, q, c):
            v = self.up(c).view(*c.shape[:2], H, V).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, v, v), v

    model = Both().eval().requires_grad_(False)
    q, c = seeded(B, H, 1, V), seeded(B, 4, L, seed=2)
    _, expected = model(q, c)
    _, v = compiled(model)(q, c)
    c.zero_()
    assert (v - expected).abs().max() < EXACT
