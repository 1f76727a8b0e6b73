"""The Hopper kernel as it is compiled, and what happens where it cannot be."""

import logging
from dataclasses import replace

import pytest
import torch

from mla_compile.kernels.hopper import runner
from mla_compile.kernels.hopper.step import Box
from tests.support.tiers import full


@full("family")  # tests/benchmarks/test_gpu_offline.py compiles another form, and CI every kernel that has changed
@pytest.mark.parametrize(
    "label",
    ["Hopper, bf16, page 64, two layers, list", "Hopper, fp8, page 64, window, soft-cap, scale per token"],
)
def test_compiles_for_hopper_within_its_budget(label):
    pytest.importorskip("triton.experimental.gluon")
    from benchmarks.gpu import offline

    (case,) = (c for c in offline.cases() if c.label == label)
    row = offline.measure(case)
    assert row["broken"] == []
    assert row["spills"] == [0, 0]


@full("family")
def test_two_ctas_compile_within_their_budget():
    from benchmarks.gpu import offline
    from mla_compile.kernels.hopper.steps import clusters

    if not clusters():
        pytest.skip("this Triton has no barriers between CTAs")
    (case,) = (c for c in offline.cases() if c.label == "Hopper, bf16, page 16, cluster of 2")
    row = offline.measure(case)
    assert (row["absent"], row["broken"], row["spills"]) == ("", [], [0, 0])


def hopper_step():
    from benchmarks.gpu import offline

    (case,) = (c for c in offline.cases() if c.label == "Hopper, bf16, 1 split")
    return case.step()[0]


@pytest.mark.usefixtures("driver")
def test_a_kernel_that_does_not_compile_is_told_once(monkeypatch, caplog):
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.experimental.gluon")

    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton, "compile", broken)
    step = hopper_step()
    with caplog.at_level(logging.WARNING, logger="mla_compile.kernels"):
        assert runner.launch_of(step, {}, 0) is None
        assert runner.launch_of(replace(step, grid=(9, 1, 1)), {}, 0) is None
    (record,) = caplog.records
    assert "the portable one runs: RuntimeError: no such instruction" in record.message


def test_a_descriptor_is_made_once_for_an_address():
    pytest.importorskip("triton.experimental.gluon")
    box = Box((4, 64, 512), (64 * 576, 576, 1), (1, 64, 256), torch.bfloat16)
    first = runner.descriptor(box, 1 << 20)
    assert (first.base.data_ptr(), first.base.dtype) == (1 << 20, torch.bfloat16)
    assert [list(x) for x in (first.shape, first.strides, first.block_shape)] == [list(x) for x in box[:3]]
    assert runner.descriptor(box, 1 << 20) is first
    assert runner.descriptor(box, 1 << 21) is not first
