"""A cache of rows, what others do with it, and how the optimized model goes on from there.

The tests share one optimized model and what is compiled for it; each fills caches of its own.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch

from mla_compile.errors import MlaCompileWarning, StaleWeightError
from mla_compile.runtime.latent import LatentTensor
from tests.passes.cache.test_models import EXACT, compare, compiled, holds_rows, stored, tensors
from tests.support.latent_modules import B, D, L, Model, R
from tests.support.programs import seeded
from tests.support.tiers import also

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """In place of that of tests/conftest.py, which forgets what is compiled after each test."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pair():
    torch.compiler.reset()
    model = Model(layers=1)
    yield model, compiled(model)
    torch.compiler.reset()


@pytest.fixture
def filled(pair):
    return *pair, *compare(*pair, calls=(4, 1))


def test_the_cache_holds_rows_and_the_numbers_stay_whatever_the_number_of_tokens_in_a_call(pair):
    holds_rows(*pair, calls=(4, 1, 1, 2, 60, 1))  # the largest number is expanded
    _, fast = pair
    assert fast.mla_report.absorbed >= 2
    assert fast.mla_report.sites[-1].code == "absorbed"  # of several tokens: no other test compiles for these


def go_on(model, fast, mine, theirs, start=5):
    x = seeded(mine.keys[0].shape[0], 1, D, seed=9)
    assert (fast(x, theirs, start) - model(x, mine, start)).abs().max() < EXACT


def test_beams_are_reordered_in_rows(filled):
    _model, _fast, mine, theirs = filled
    order = torch.tensor([1, 1])
    for cache in (mine, theirs):
        cache.keys = [k.index_select(0, order) for k in cache.keys]
        cache.values = [v.index_select(0, order) for v in cache.values]
    assert stored(theirs) == B * 5 * (L + R)
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
    assert stored(theirs) == B * 6 * (L + R)


@pytest.mark.parametrize(("written", "left"), [("keys", "values"), *also("combination", ("values", "keys"))])
def test_a_write_through_a_view_shows_in_the_tensor_and_in_the_next_call(filled, written, left):
    for cache in filled[2:]:
        (tensor,) = getattr(cache, written)
        part = tensor[:, :, 1:3]
        part[:, 1] = 7.0
        assert (tensor[:, 1, 1:3] == 7).all()
    go_on(*filled)
    # What nobody wrote to is still read as rows.
    assert filled[1].mla_report.sites[-1].parts == (left,)


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
    assert theirs.keys[0].data_ptr() != 0


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
    try:
        with pytest.raises(StaleWeightError, match="start with an empty cache"):
            fast(seeded(B, 1, D), theirs, 5)
        compare(model, fast, calls=(4, 1, 1))
    finally:
        model.layers[0].up.weight.div_(2)  # exactly what it was


def test_a_cache_of_another_model_is_expanded(filled):
    model, _fast, mine, theirs = filled
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    with pytest.warns(MlaCompileWarning):
        got = compiled(other)(seeded(B, 1, D, seed=9), theirs, 5)
    assert (got - other(seeded(B, 1, D, seed=9), mine, 5)).abs().max() < EXACT
