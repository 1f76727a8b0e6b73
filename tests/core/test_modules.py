"""Copies of module objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.core.modules import shallow
from tests.support import latent_modules
from tests.support.programs import seeded


def wrapped(module: nn.Module) -> nn.Module:
    """``module`` with a class over its own that makes objects of the class below, as ``fully_shard`` does."""

    def make(cls, *args, **kwargs):
        below = cls.__mro__[1]
        made = below.__new__(below)
        made.__init__(*args, **kwargs)
        return made

    kind = type(module)
    module.__class__ = type(f"Wrapped{kind.__name__}", (kind,), {"__new__": make})
    return module


def test_a_class_that_has_taken_new_for_itself():
    class Needs(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.weight = config, nn.Parameter(torch.ones(2))

    module = wrapped(Needs("given"))
    copied = shallow(module)
    assert copied is not module
    assert type(copied) is type(module)
    assert copied.weight is module.weight
    assert vars(copied) == vars(module)


@pytest.mark.thorough
def test_optimize_takes_it():
    model = wrapped(latent_modules.Model(layers=1))
    fast = mla_compile.optimize(model, codegen="eager")
    x, again = seeded(2, 5, latent_modules.D), seeded(2, 1, latent_modules.D, seed=1)
    caches = latent_modules.Cache(1), latent_modules.Cache(1)
    with torch.no_grad():
        for given, start in ((x, 0), (again, 5)):
            expected, result = (m(given, cache, start) for m, cache in zip((model, fast), caches, strict=True))
            assert (result - expected).abs().max() < 1e-10
    assert type(fast) is type(model)
    assert fast.mla_report.absorbed
