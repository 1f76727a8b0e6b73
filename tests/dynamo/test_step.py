"""The step of a model whose weights several ranks hold, as the first of two of them traces it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

import mla_compile
from mla_compile.capture.causal_lm import wire
from mla_compile.dynamo.step import trace_step
from mla_compile.errors import CaptureError, InputError
from mla_compile.passes.ir.collectives import collectives
from tests.distributed.jobs import by_heads, fsdp, small
from tests.support import models
from tests.support.one_rank import mesh  # noqa: F401  a fixture


def dense():
    return models.build("minicpm3", num_hidden_layers=1)


def test_a_step_takes_the_tensors_of_its_rank(mesh):  # noqa: F811
    model = by_heads(dense())
    program = trace_step(wire(model), one_token=True)
    inputs = [node.name for node in program.placeholders if node.name not in program.weights]
    assert inputs == ["input_ids", "position_ids", "caches_0", "caches_1"]
    B, T = program.node("caches_0").meta["val"].shape[:2]
    assert [str(program.node("input_ids").meta["val"].shape), type(T)] == [f"torch.Size([{B}, 1])", torch.SymInt]
    held = [tensor for tensor in program.weights.values() if tensor is not None]
    assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in held)
    local = model.model.layers[0].self_attn.kv_b_proj.weight.to_local()
    assert any(tensor.data_ptr() == local.data_ptr() and tensor.shape == local.shape for tensor in held)
    assert [name for name, _ in collectives(program.gm.graph)] == [
        "_c10d_functional::all_reduce",
        "_c10d_functional::wait_tensor",
    ]


def test_layers_that_are_gathered_for_a_call(mesh):  # noqa: F811
    with pytest.raises(CaptureError, match="whose weights several ranks hold, cannot be traced"):
        mla_compile.continuous_batching(fsdp(small()))


def test_requests_that_are_divided_among_ranks(mesh):  # noqa: F811
    """Half the requests a rank, rounded up: a step of other sizes would be another one."""
    model = by_heads(dense())
    for style in (
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        SequenceParallel(sequence_dim=0, use_local_output=True),
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    ):
        parallelize_module(model.model.norm, mesh, style)
    with pytest.raises(CaptureError, match="can only be traced for sizes with"):
        trace_step(wire(model), one_token=True)


def test_ranks_that_the_scheduler_does_not_know(mesh):  # noqa: F811
    model = by_heads(small(), init_device_mesh("cpu", (2,), mesh_dim_names=("heads",)))
    with pytest.raises(InputError, match=r"the one axis 'tp'.*heads=2"):
        mla_compile.continuous_batching(model)
