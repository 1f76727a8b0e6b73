"""Models that keep K and V per head: optimized, their caches hold rows, and nobody can tell from the numbers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.errors import MlaCompileWarning, StaleWeightError
from mla_compile.runtime.latent import LatentTensor
from tests.support.latent_modules import LAYERS, B, Cache, D, H, L, Model, N, R, TokenLists, V
from tests.support.programs import seeded

EXACT = 1e-12
CALLS = (7, 1, 1, 2, 1)  # tokens in each call


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


def compare(model, fast, cache=Cache, calls=CALLS, batch=B):
    """Runs both side by side; returns their caches."""
    mine, theirs, start = cache(), cache(), 0
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


@pytest.mark.parametrize("style", ["plain", "bias", "heads_last", "assigned", "written_out", "copied_first"])
def test_the_cache_holds_rows_and_the_numbers_stay(style):
    model = Model(style)
    fast = compiled(model)
    mine, theirs = compare(model, fast)
    for expected, got in zip(tensors(mine), tensors(theirs), strict=True):
        assert isinstance(got, LatentTensor)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < EXACT
    assert stored(theirs) == LAYERS * B * sum(CALLS) * (L + R)
    assert sum(t.numel() for t in tensors(mine)) == LAYERS * B * sum(CALLS) * H * (N + R + V)
    assert fast.mla_report.absorbed == 2 * LAYERS  # one token and several tokens, of any past
    assert all(site.code in ("absorbed", "cost_prefill") for site in fast.mla_report.sites)


def test_by_the_backend_too():
    model = Model()
    _, theirs = compare(model, compiled(model, "backend"))
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_through_inductor_and_without_our_op():
    model = Model()
    compare(model, compiled(model, codegen="inductor", lowering="aten"), calls=(5, 1, 1))


def test_both_forms_take_and_return_rows():
    """Many tokens at once over a long cache: the expanded form, of the same compiled graph."""
    model = Model()
    fast = compiled(model)
    _, theirs = compare(model, fast, calls=(3, 2, 4, 40, 1))
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_a_list_of_tokens_is_joined_in_rows():
    model = Model()
    mine, theirs = compare(model, compiled(model), TokenLists, calls=(3, 1, 1))
    for own, other in zip(tensors(mine), tensors(theirs), strict=True):
        assert all(isinstance(t, LatentTensor) for t in other)
        assert all((a - b).abs().max() < EXACT for a, b in zip(own, other, strict=True))


@pytest.mark.filterwarnings("ignore:nothing was absorbed")  # in the first call, where there is nothing to save
def test_a_prompt_of_one_token_and_a_batch_of_one():
    model = Model()
    _, theirs = compare(model, compiled(model), calls=(1, 1, 1, 3), batch=1)
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_the_option_that_leaves_caches_alone():
    model = Model()
    with pytest.warns(MlaCompileWarning, match="expanded_cache"):
        _, theirs = compare(model, compiled(model, cache="expanded"), calls=(3, 1))
    assert not any(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_keys_rotated_after_the_projection_are_kept_as_they_are():
    model = Model("rope_on_keys")
    with pytest.warns(MlaCompileWarning):
        _, theirs = compare(model, compiled(model), calls=(3, 1, 1))
    assert not any(isinstance(t, LatentTensor) for t in theirs.keys)


def test_a_cache_filled_by_the_original_is_continued_as_it_is():
    model = Model()
    fast = compiled(model)
    mine, theirs = Cache(), Cache()
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
            self.w = nn.ModuleList(nn.Linear(D, H * V, bias=False).double() for _ in range(3))

        def forward(self, x, cache, start):
            b, s, _ = x.shape
            q, k, v = (w(x).view(b, s, H, V).transpose(1, 2) for w in self.w)
            k, v = cache.update(0, k, v)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).reshape(b, s, H * V)

    model = Plain().eval().requires_grad_(False)
    with pytest.warns(MlaCompileWarning, match="not MLA"):
        mine, theirs = compare(model, compiled(model), calls=(3, 1, 1))
    assert type(theirs.keys[0]) is type(mine.keys[0]) is torch.Tensor


# What others do with the cache.


@pytest.fixture
def filled():
    model = Model()
    fast = compiled(model)
    mine, theirs = compare(model, fast, calls=(4, 1))
    return model, fast, mine, theirs


def go_on(model, fast, mine, theirs, start=5):
    x = seeded(mine.keys[0].shape[0], 1, D, seed=9)
    assert (fast(x, theirs, start) - model(x, mine, start)).abs().max() < EXACT


def test_beams_are_reordered_in_rows(filled):
    _model, _fast, mine, theirs = filled
    order = torch.tensor([1, 1])
    for cache in (mine, theirs):
        cache.keys = [k.index_select(0, order) for k in cache.keys]
        cache.values = [v.index_select(0, order) for v in cache.values]
    assert stored(theirs) == LAYERS * B * 5 * (L + R)
    go_on(*filled)
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_a_cache_is_cut_back_in_rows(filled):
    _, _, mine, theirs = filled
    for cache in (mine, theirs):
        cache.keys = [k[:, :, :3] for k in cache.keys]
        cache.values = [v[..., :3, :] for v in cache.values]
    go_on(*filled, start=3)
    assert all(isinstance(t, LatentTensor) for t in tensors(theirs))


def test_a_deep_copy_goes_its_own_way(filled):
    _model, _fast, _mine, theirs = filled
    other = copy.deepcopy(theirs)
    other.keys[0].zero_()
    go_on(*filled)
    assert (other.keys[0] == 0).all()
    assert stored(theirs) == LAYERS * B * 6 * (L + R)


def test_a_write_through_a_view_shows_in_the_tensor_and_in_the_next_call(filled):
    _model, _fast, mine, theirs = filled
    for cache in (mine, theirs):
        part = cache.keys[0][:, :, 1:3]
        part[:, 1] = 7.0
        assert (cache.keys[0][:, 1, 1:3] == 7).all()
        cache.values[1][0] += 1
    go_on(*filled)
    report = filled[1].mla_report
    # What nobody wrote to is still read as rows: V of the first layer, K of the second.
    assert [site.parts for site in report.sites[-LAYERS:]] == [("values",), ("keys",)]


def test_reading_leaves_the_rows_alone(filled):
    _, _, mine, theirs = filled
    assert torch.equal((theirs.keys[0] * 2 - theirs.keys[0]).isfinite().all(), torch.tensor(True))
    assert (theirs.keys[0].sum() - mine.keys[0].sum()).abs() < EXACT
    assert theirs.keys[0].tolist()[0][0][0] == pytest.approx(mine.keys[0].tolist()[0][0][0])
    assert "LatentTensor(shape=" in repr(theirs.keys[0])
    assert theirs.keys[0].recipe is not None


def test_memory_that_is_read_directly_is_k(filled):
    _, _, mine, theirs = filled
    array = theirs.values[0].numpy()
    assert abs(array - mine.values[0].numpy()).max() < EXACT
    array[0] = 3.0
    assert (theirs.values[0][0] == 3).all()
    assert theirs.keys[1].data_ptr() != 0


def test_a_saved_cache_is_plain(filled):
    _, _, mine, theirs = filled
    file = io.BytesIO()
    torch.save(theirs.keys, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(t) is torch.Tensor for t in loaded)
    assert (loaded[0] - mine.keys[0]).abs().max() < EXACT


def test_weights_changed_after_the_cache_was_filled(filled):
    model, fast, _, theirs = filled
    model.layers[0].up.weight.mul_(2)
    with pytest.raises(StaleWeightError, match="start with an empty cache"):
        fast(seeded(B, 1, D), theirs, 5)
    compare(model, fast, calls=(4, 1, 1))


def test_a_cache_of_another_model_is_expanded(filled):
    model, _fast, mine, theirs = filled
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    with pytest.warns(MlaCompileWarning):
        got = compiled(other)(seeded(B, 1, D, seed=9), theirs, 5)
    assert (got - other(seeded(B, 1, D, seed=9), mine, 5)).abs().max() < EXACT


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
