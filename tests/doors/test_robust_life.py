"""What outlives what: copies, files, models that are dropped, and a generation of 200 steps."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mla_compile import CaptureError, MlaCompileWarning, explain, optimize
from mla_compile.capture import capture
from tests.support.models import build
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


def saved_and_loaded(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        return self.inner(x, rows)


@pytest.mark.parametrize("duplicate", [saved_and_loaded, *also("combination", copy.deepcopy)])
def test_a_copy_inside_another_module_is_optimized_and_has_weights_of_its_own(duplicate: Any) -> None:
    fast = optimize(Toy().eval(), fold="always", **FAST)
    with torch.no_grad():
        fast(*decode_inputs())
        other = duplicate(Wrapper(fast))
        other.inner.up.weight.mul_(2)
        got, want = other(*decode_inputs()), Toy.forward(other.inner, *decode_inputs())
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(got[0], fast(*decode_inputs())[0])
    assert other.inner.forward.module is other.inner
    assert other.inner.forward.options == fast.forward.options
    assert other.inner.mla_report.absorbed == 1


def test_a_saved_transformers_model_keeps_its_settings_and_its_entry_for_generate() -> None:
    fast = optimize(build("minicpm3", num_hidden_layers=1), fullgraph=True, **FAST)
    other = saved_and_loaded(fast)
    assert other.forward.module is other
    assert other.get_compiled_call(None) == other.__call__
    assert other.forward.settings == {"fullgraph": True}
    assert other.forward.compiler is not fast.forward.compiler


class Halved:
    """A forward set on a model, as a library that patches models does."""

    def __init__(self, model: Toy) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        y, rows = Toy.forward(self.model, x, rows)
        return y / 2, rows


@pytest.mark.parametrize("duplicate", [copy.deepcopy, *also("combination", saved_and_loaded)])
def test_a_copy_keeps_the_forward_that_was_set_on_the_object(duplicate: Any) -> None:
    model = Toy().eval()
    model.forward = Halved(model)  # type: ignore[method-assign]
    fast = optimize(model, **FAST)
    other = duplicate(fast)
    with torch.no_grad():
        want = model(*decode_inputs())
        torch.testing.assert_close(fast(*decode_inputs()), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other(*decode_inputs()), want, rtol=1e-5, atol=1e-5)


def fails(model: nn.Module) -> nn.Module:
    fast = optimize(model, **FAST)
    refused = mock.patch.object(capture, "from_dynamo", side_effect=CaptureError("refused by the test"))
    with torch.no_grad(), refused, pytest.warns(MlaCompileWarning, match="refused by the test"):
        fast(*decode_inputs())
    assert fast.forward.compiler.failures
    return fast


USES = {
    "optimize": lambda model: optimize(model, **FAST),
    "optimize, folded": lambda model: optimize(model, fold="always", **FAST),
    "optimize, a failure": fails,
    "backend": lambda model: torch.compile(model, backend="mla", options={**FAST, "fold": "always"}),
    "explain": lambda model: explain(model, *decode_inputs()) and model,
}


@pytest.mark.parametrize("use", USES)
def test_a_model_that_is_dropped_is_freed(use: str) -> None:
    model = Toy().eval()
    weights = [weakref.ref(weight) for weight in model.parameters()]
    compiled = USES[use](model)
    with torch.no_grad():
        compiled(*decode_inputs())
    del model, compiled
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def alive() -> tuple[int, int]:
    """Graphs and tensors."""
    for _ in range(3):  # what is freed may free what it held in turn
        gc.collect()
    kinds = [type(o) for o in gc.get_objects()]  # not isinstance: it asks the object, and proxies warn
    return sum(issubclass(k, torch.fx.GraphModule) for k in kinds), sum(issubclass(k, torch.Tensor) for k in kinds)


def test_optimizing_and_dropping_models_leaves_no_graphs_behind() -> None:
    def once(seed: int) -> None:
        with torch.no_grad():
            optimize(Toy(seed).eval(), **FAST)(*decode_inputs())
        explain(Toy(seed).eval(), *decode_inputs())

    once(0)
    before = alive()
    for seed in range(2):
        once(seed)
    graphs, tensors = (now - then for now, then in zip(alive(), before, strict=True))
    assert graphs <= 1
    assert tensors <= 30  # one compilation holds some two dozen


def test_two_hundred_steps_take_no_more_memory_than_twenty() -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **FAST)
    x, rows = decode_inputs()
    counts = {}
    with torch.no_grad():
        for step in range(200):
            y, rows = fast(x, rows)
            x = y / y.norm()
            if step in (20, 199):
                counts[step] = (*alive(), fast.forward.compiler.graphs, len(fast.forward.compiler.reports))
    assert rows.shape[1] == 219
    assert counts[199] == counts[20]
    assert counts[199][2] == 2  # one for the first size, one for all others
