"""Dequantized once for each version of a weight, or in every step: the same numbers, and changes are followed."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import mla_compile
from mla_compile.runtime import folds
from tests.support.quantized import Attention, H, Int8, L, N, V, error, exact, inputs, optimized
from tests.support.tiers import also

pytestmark = pytest.mark.thorough


def dequantized(layer: Int8, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, (layer.weight.float() * layer.scale[:, None]).to(x.dtype))


def kept(fast) -> int:
    """How many weights the absorbed graph keeps dequantized."""
    return next(p.changes for p in fast.mla_report.passes if p.name == "dequantize")


@pytest.mark.parametrize("codegen", ["eager", *also("inductor", "inductor")])
def test_once_and_in_every_step_are_the_same(codegen):
    torch.manual_seed(0)
    layer = Int8(dequantized)
    truth = exact(layer.dense())
    results = {}
    for mode, count in (("once", 2), ("step", 0)):
        fast, results[mode], before = optimized(layer, dequantize=mode, codegen=codegen)
        assert kept(fast) == count
        assert error(results[mode], truth) <= 1.1 * error(before, truth)
    assert error(results["once"], results["step"].double()) < 0.01


@pytest.mark.parametrize("change", ["in place", "replaced", *also("combination", "loaded", "data")])
def test_changes_of_the_weights_are_followed(change):
    torch.manual_seed(0)
    layer = Int8(dequantized)
    fast, first, _ = optimized(layer, dequantize="once")
    assert kept(fast) == 2
    other = Int8(dequantized)
    with torch.no_grad():
        if change == "in place":
            layer.weight.copy_(other.weight)
            layer.scale.copy_(other.scale)
        elif change == "replaced":
            layer.weight, layer.scale = other.weight, other.scale
        elif change == "loaded":
            layer.load_state_dict(other.state_dict())
        else:
            layer.weight.data, layer.scale.data = other.weight, other.scale
        after, before = fast(*inputs()), Attention(other).eval()(*inputs())
    assert not torch.equal(after, first)
    assert error(after, before.double()) < 0.02


def stored() -> int:
    """How many dequantized weights the process keeps."""
    torch._dynamo.reset()
    gc.collect()
    return len(folds._stored)


def test_graphs_share_what_they_keep():
    """The graphs of one batch and of another keep one copy of each weight."""
    torch.manual_seed(0)
    module = Attention(Int8(dequantized)).eval()
    before = stored()
    fast = mla_compile.optimize(module, codegen="eager", forms="absorbed", dequantize="once", dynamic=False)
    with torch.no_grad():
        fast(*inputs(batch=1))
        fast(*inputs(batch=3))
    assert len(fast.mla_report.sites) == 2
    assert len(folds._stored) - before == 2
    assert sum(value.numel() for value in folds._stored.values()) >= H * (N + V) * L


def test_nothing_is_kept_when_the_model_is_gone():
    torch.manual_seed(0)
    before = stored()
    fast, *others = optimized(Int8(dequantized), dequantize="once")
    assert len(folds._stored) == before + 2
    del fast, others
    assert stored() == before


def test_auto_counts_bytes():
    """int8 read as it goes by the rows of one step; for many rows it would be written out in each."""
    torch.manual_seed(0)
    for batch, count in ((1, 0), (8, 2)):
        torch._dynamo.reset()
        module = Attention(Int8(dequantized)).eval()
        fast = mla_compile.optimize(module, codegen="eager", forms="absorbed")
        with torch.no_grad():
            fast(*inputs(batch=batch))
        assert kept(fast) == count


def test_programs_keep_it_where_they_are_asked_to():
    torch.manual_seed(0)
    module = Attention(Int8(dequantized)).eval()
    given = inputs()
    exported = torch.export.export(module, given)
    results = {}
    for mode, buffers in (("auto", 0), ("once", 2)):
        made = mla_compile.optimize(exported, forms="absorbed", dequantize=mode)
        assert len(made.constants) - len(exported.constants) == buffers
        results[mode] = made.module()(*given)
    torch.testing.assert_close(results["once"], results["auto"], rtol=2e-2, atol=2e-3)


def test_plain_weights_are_never_kept():
    torch.manual_seed(0)
    fast, *_ = optimized(torch.nn.Linear(L, H * (N + V), bias=False, dtype=torch.bfloat16), dequantize="once")
    assert kept(fast) == 0
