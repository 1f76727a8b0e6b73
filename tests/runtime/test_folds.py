"""Folded weights follow the live ones, whatever changes those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mla_compile.codes import Code
from mla_compile.core.program import FoldedWeight, Program
from mla_compile.errors import StaleWeightError, WeightError
from mla_compile.runtime import folds
from mla_compile.runtime.folds import FoldedWeights
from tests.support.compiling import compiled, compiler
from tests.support.quantized import Int8, optimized
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs


def folding(model: Toy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[int]]:
    """``model`` compiled with folds that count how often they are computed."""
    counts: list[int] = []
    compute = folds.compute

    def counted(fold: FoldedWeight, live: Any) -> torch.Tensor:
        counts.append(1)
        return compute(fold, live)

    monkeypatch.setattr(folds, "compute", counted)
    backend = compiler(fold="always", **options)
    step = compiled(model, backend)
    with torch.no_grad():
        step(*decode_inputs())
    assert counts, "nothing was folded"
    return step, counts


def scale_in_place(model: Toy) -> None:
    model.up.weight.mul_(2)


def scale_data(model: Toy) -> None:
    model.up.weight.data.mul_(2)


def replace_parameter(model: Toy) -> None:
    model.up.weight = nn.Parameter(model.up.weight * 2)


def assign_data(model: Toy) -> None:
    model.up.weight.data = model.up.weight.data * 2


def load(model: Toy) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "codegen"),
    [
        (scale_in_place, "eager"),
        (replace_parameter, "eager"),
        (assign_data, "eager"),
        *also("combination", (scale_data, "eager"), (load, "eager")),
        *also("inductor", (scale_in_place, "inductor"), (replace_parameter, "inductor")),
    ],
)
def test_folded_weights_follow_the_live_ones(change: Any, codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy().eval()
    step, counts = folding(model, monkeypatch, codegen=codegen)
    x, rows = decode_inputs()
    with torch.no_grad():
        first = len(counts)
        step(x, rows)
        assert len(counts) == first, "folded again although nothing changed"
        before = model(x, rows)[0]
        change(model)
        got, want = step(x, rows)[0], model(x, rows)[0]
    assert len(counts) > first
    assert not torch.allclose(before, want)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def weights_program(*tensors: torch.Tensor, compute: Any) -> Program:
    graph = torch.fx.Graph()
    names = [graph.placeholder(f"w{i}").name for i in range(len(tensors))]
    graph.placeholder("folded")
    graph.output(())
    program = Program(torch.fx.GraphModule({}, graph), weights=dict(zip(names, tensors, strict=True)))
    program.folds.append(FoldedWeight("folded", compute, tuple(names)))
    return program


def test_one_graph_may_serve_layers_in_turn_without_folding_anew() -> None:
    calls: list[int] = []

    def compute(live: Any) -> torch.Tensor:
        calls.append(1)
        return live["w0"] * 2

    layers = [torch.full((2,), float(i)) for i in range(3)]
    folds = FoldedWeights(weights_program(layers[0], compute=compute))
    for _ in range(2):
        for layer in layers:
            (value,) = folds.values([layer])
            assert torch.equal(value, layer * 2)
    assert len(calls) == 3
    address = folds.values([layers[0]])[0].data_ptr()
    layers[0].fill_(9)
    assert torch.equal(folds.values([layers[0]])[0], torch.full((2,), 18.0))
    assert folds.values([layers[0]])[0].data_ptr() == address, "a CUDA graph would still read the old memory"


def test_nan_weights_are_not_folded_in_every_call() -> None:
    calls: list[int] = []

    def compute(live: Any) -> torch.Tensor:
        calls.append(1)
        return live["w0"] * 2

    weight = torch.tensor([float("nan"), 0.0])
    folds = FoldedWeights(weights_program(weight, compute=compute))
    folds.values([weight])
    folds.values([weight])
    assert len(calls) == 1
    weight[1] = -0.0
    folds.values([weight])
    assert len(calls) == 2


def test_a_fold_that_changes_its_shape_is_refused_not_stale() -> None:
    weight = torch.ones(2)
    folds = FoldedWeights(weights_program(weight, compute=lambda live: live["w0"] * 2))
    folds.values([weight])
    weight.data = torch.ones(3)
    with pytest.raises(StaleWeightError, match="compile the model again"):
        folds.values([weight])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, device="meta"), "no values"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "float8"),
    ],
)
def test_weights_without_dense_values_cannot_be_folded(weight: torch.Tensor, message: str) -> None:
    folds = FoldedWeights(weights_program(weight, compute=lambda live: live["w0"] + live["w0"]))
    with pytest.raises(WeightError, match=message):
        folds.values([weight])


@pytest.mark.thorough
def test_constants_of_a_dequantization_outlive_their_nodes() -> None:
    """``torch.tensor`` inside of forward: a node that only the dequantized weight read is gone from the graph."""
    torch.manual_seed(0)

    def product(own: Int8, x: torch.Tensor) -> torch.Tensor:
        back = torch.tensor([1, 0]).argsort()
        weight = own.weight.unflatten(0, (-1, 2))[:, back].flatten(0, 1)
        return x @ (weight.to(x.dtype) * own.scale.to(x.dtype)[:, None]).t()

    fast, after, before = optimized(Int8(product), dtype=torch.float32, dequantize="once")
    assert fast.mla_report.sites[0].code == Code.ABSORBED
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
