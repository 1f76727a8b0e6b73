"""Calls under every mode, calls that fail, and calls that are interrupted while they compile."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_compile import MlaCompileWarning, optimize
from mla_compile.passes.linear import analysis as linear_map
from mla_compile.pipeline import analyses, rewrites
from mla_compile.runtime import folds
from tests.support.toy import Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


def assert_same(fast: Any, model: Any, inputs: Any = None) -> None:
    given = decode_inputs() if inputs is None else inputs
    got, want = fast(*given), model(*given)
    assert got[0].dtype == want[0].dtype
    assert got[0].requires_grad == want[0].requires_grad
    assert got[0].is_inference() == want[0].is_inference()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradient_modes_may_alternate() -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **FAST)
    with torch.inference_mode():
        made_in_inference = decode_inputs()
    for _ in range(2):
        with torch.inference_mode():
            assert_same(fast, model)
        with torch.no_grad():
            assert_same(fast, model)
            assert_same(fast, model, made_in_inference)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MlaCompileWarning)
            assert_same(fast, model)
    model.requires_grad_(False)
    x, rows = decode_inputs()
    x.requires_grad_()
    with pytest.warns(MlaCompileWarning, match="gradients are enabled"):
        assert_same(fast, model, (x, rows))
    (want,) = torch.autograd.grad(model(x, rows)[0].sum(), x)
    (got,) = torch.autograd.grad(fast(x, rows)[0].sum(), x)
    torch.testing.assert_close(got, want)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", AROUND)
def test_settings_around_a_compilation_change_nothing_and_it_draws_no_random_numbers(around: str) -> None:
    model = Toy().eval()
    fast = optimize(model, codegen="eager", verify=True, strict=True, fold="always")
    inputs = decode_inputs()
    before = torch.get_rng_state()
    with torch.no_grad():
        with AROUND[around]():
            got = fast(*inputs)
        torch.testing.assert_close(got, model(*inputs), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)
    assert fast.mla_report.absorbed == 1


class Raising(Toy):
    def forward(self, x: Any, rows: Any, how: str = "") -> Any:
        if how == "error":
            raise ValueError("the model's own error")
        y, rows = super().forward(x, rows)
        torch._assert_async(rows.abs().max() < 100)
        assert how != "assertion", "the model's own assertion"
        return y, rows


def test_an_error_of_the_model_reaches_the_caller_and_the_next_call_works() -> None:
    model = Raising().eval()
    fast = optimize(model, **FAST)
    x, rows = decode_inputs()
    for _ in range(2):
        with torch.no_grad():
            with pytest.raises(ValueError, match="own error"):
                fast(x, rows, "error")
            with pytest.raises(AssertionError, match="own assertion"):
                fast(x, rows, "assertion")
            with pytest.raises(RuntimeError):
                fast(x, rows * 1e6)
            with pytest.raises(RuntimeError):
                fast(x, rows[:1])
            with pytest.raises(TypeError, match="rows"):
                fast(x)
            assert_same(fast, model)
    assert fast.mla_report.absorbed >= 1


PLACES = [
    (analyses, "find_attention"),
    (linear_map.LinearMaps, "__init__"),
    (rewrites, "absorb_site"),
    (rewrites, "remove_dead_code"),
    (folds, "compute"),
]


def test_interrupts_anywhere_leave_the_model_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **FAST)
    with torch.no_grad():
        for owner, name in PLACES:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    fast(*decode_inputs())
            assert "forward" in vars(fast), name
        assert_same(fast, model)
    assert torch.is_grad_enabled()
    assert fast.mla_report.absorbed == 1


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_other_tracers_see_the_original() -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    inputs = decode_inputs()
    with torch.no_grad():
        fast(*inputs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*treespec.*")
            for strict in (False, True):
                exported = torch.export.export(fast, inputs, strict=strict)
                assert not [n for n in exported.graph.nodes if "mla_compile" in str(n.target)]
        compiled = torch.compile(fast, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=0)
        doubled = {name: 2 * value for name, value in model.state_dict().items()}
        got = torch.func.functional_call(fast, doubled, inputs)
        torch.testing.assert_close(got, torch.func.functional_call(model, doubled, inputs), rtol=1e-5, atol=2e-5)
        assert_same(fast, model)
