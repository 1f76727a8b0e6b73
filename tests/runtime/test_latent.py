"""Tensors that carry rows, when the weights that they are expanded with are not there."""

from __future__ import annotations

import pytest
import torch

import mla_compile
from mla_compile.errors import StaleWeightError
from mla_compile.runtime.latent import LatentTensor
from tests.support import latent_modules
from tests.support.programs import seeded


@pytest.mark.thorough
def test_weights_without_memory():
    """FSDP frees the weights of a layer after each call of it."""
    model = latent_modules.Model(layers=1)
    fast, cache = mla_compile.optimize(model, codegen="eager"), latent_modules.Cache(1)
    with torch.no_grad():
        fast(seeded(2, 5, latent_modules.D), cache, 0)
    k = cache.keys[0]
    assert isinstance(k, LatentTensor)
    before = k + 0
    weight = model.layers[0].up.weight
    values = weight.detach().clone()
    with torch.no_grad():
        weight.untyped_storage().resize_(0)
        with pytest.raises(mla_compile.WeightError, match="has no memory now"):
            k + 0
        weight.untyped_storage().resize_(values.numel() * values.element_size())
        with torch.autograd._unsafe_preserve_version_counter(weight):  # as FSDP fills it again
            weight.copy_(values)
    assert torch.equal(k + 0, before)


def test_a_slice_of_tokens_has_their_shape_whether_rows_are_kept_or_not() -> None:
    model, cache = latent_modules.Model(layers=1), latent_modules.Cache(1)
    with torch.no_grad():
        mla_compile.optimize(model, codegen="eager")(seeded(2, 7, latent_modules.D), cache, 0)
        k = cache.keys[0]
        assert isinstance(k, LatentTensor)
        want = (k + 0)[:, :, 3:5]
        kept = k[:, :, 3:5]
        assert kept.shape == want.shape
        torch.testing.assert_close(kept + 0, want)
        k[:, :, :1] += 0  # K takes the place of its rows
        part = k[:, :, 3:5]
    assert part.shape == want.shape
    torch.testing.assert_close(part + 0, want)


def test_what_is_copied_over_rows_needs_them_no_more() -> None:
    """Not even if they can no longer be expanded, because a weight has changed under them."""
    model, cache = latent_modules.Model(layers=1), latent_modules.Cache(1)
    with torch.no_grad():
        mla_compile.optimize(model, codegen="eager")(seeded(2, 7, latent_modules.D), cache, 0)
        k = cache.keys[0]
        model.layers[0].up.weight.mul_(2)
        with pytest.raises(StaleWeightError):
            k + 0
        new = seeded(*k.shape)
        assert k.copy_(new) is k
        assert torch.equal(k + 0, new)
