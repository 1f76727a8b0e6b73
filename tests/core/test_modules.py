"""Copies of module objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.core.modules import shallow
from tests.support.toy import Toy, decode_inputs


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
    model = wrapped(Toy().double().eval())
    fast = mla_compile.optimize(model, codegen="eager")
    x, rows = (tensor.double() for tensor in decode_inputs())
    with torch.no_grad():
        (expected, _), (result, _) = model(x, rows), fast(x, rows)
    assert (result - expected).abs().max() < 1e-10
    assert type(fast) is type(model)
    assert fast.mla_report.absorbed
