"""The compiler behind ``backend="mla"``: what it rewrites, what it leaves to Inductor as it came, and what it says."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from mla_compile import pipeline
from mla_compile.backend import mla, reports
from mla_compile.dynamo.candidates import has_attention
from mla_compile.dynamo.compiler import Compiler
from mla_compile.errors import MlaCompileWarning, WeightError
from mla_compile.options import Options
from mla_compile.runtime import folds
from tests.support.compiling import compiled, compiler
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs


class Plain(nn.Module):
    """Ordinary attention: nothing to absorb."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 5, 4, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("codegen", "lowering"),
    [("eager", "aten"), ("eager", "op"), *also("inductor", ("inductor", "aten"), ("inductor", "op"))],
)
def test_decode_is_absorbed_and_equal(codegen: str, lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, rows) = Toy().eval(), decode_inputs()
    backend = compiler(codegen=codegen, lowering=lowering)
    with torch.no_grad(), caplog.at_level(logging.INFO, "mla_compile"):
        got = compiled(model, backend)(x, rows)
        want = model(x, rows)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (report,) = backend.reports
    assert report.absorbed == 1
    lines = [r.getMessage() for r in caplog.records if r.name == "mla_compile" and r.levelno == logging.INFO]
    assert lines == [report.summary()]


def test_mode_and_inductor_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as module

    seen: list[dict[str, Any]] = []

    def fake(gm: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(module, "compile_fx", fake)
    for arguments in (
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"max_autotune": True, "triton.cudagraphs": False, "lowering": "aten"}},
        {"options": {"inductor": {"max-autotune": True}, "lowering": "aten"}},
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(Toy().eval(), backend=mla, **arguments)(*decode_inputs())
    assert seen[0] == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert seen[1] == {"max_autotune": True, "triton.cudagraphs": False}
    assert seen[2] == {"max_autotune": True}


def untouched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.fx.GraphModule, str]]:
    """Graphs that reach Inductor, with their code as Dynamo made it."""
    import torch._inductor.compile_fx as module

    seen: list[tuple[torch.fx.GraphModule, str]] = []

    def fake(gm: Any, inputs: Any, config_patches: Any) -> Any:
        seen.append((gm, gm.code))
        return gm

    monkeypatch.setattr(module, "compile_fx", fake)
    return seen


def received(backend: Compiler) -> tuple[list[tuple[torch.fx.GraphModule, str]], Any]:
    given: list[tuple[torch.fx.GraphModule, str]] = []

    def outer(gm: Any, inputs: Any) -> Any:
        given.append((gm, gm.code))
        return backend(gm, inputs)

    return given, outer


def test_with_gradients_inductor_gets_the_graph_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = untouched(monkeypatch)
    backend = Compiler(Options(strict=True))
    monkeypatch.setattr(backend, "_rewrite", lambda *_: pytest.fail("a training graph was captured"))
    given, outer = received(backend)
    model, (x, rows) = Toy(), decode_inputs()
    with pytest.warns(MlaCompileWarning, match="gradients are enabled"):
        y, _ = torch.compile(model, backend=outer)(x, rows)
    y.sum().backward()
    assert seen == given
    assert model.up.weight.grad is not None


def test_gradients_switched_off_inside_are_inference() -> None:
    class Inside(Toy):
        @torch.no_grad()
        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
            return super().forward(x, rows)

    model, (x, rows) = Inside(), decode_inputs()
    for codegen in ("eager", "inductor"):
        torch._dynamo.reset()
        y, _ = torch.compile(model, backend="mla", options={"codegen": codegen, "strict": True})(x, rows)
        torch.testing.assert_close(y, model(x, rows)[0], rtol=1e-5, atol=1e-5)
        assert reports()[-1].absorbed == 1
        assert not y.requires_grad
        assert torch.is_grad_enabled()


def test_a_graph_without_attention_is_not_even_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = untouched(monkeypatch)
    given, outer = received(Compiler(Options(strict=True)))
    monkeypatch.setattr(Compiler, "_rewrite", lambda *_: pytest.fail("captured"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(nn.Linear(4, 4), backend=outer)(torch.ones(2, 4))
    assert seen == given
    assert not has_attention(given[0][0])


def test_nothing_absorbed_is_a_warning_and_the_graph_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = untouched(monkeypatch)
    given, outer = received(Compiler(Options(strict=True)))
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match="nothing was absorbed"):
        torch.compile(Plain(), backend=outer)(torch.ones(2, 5, 32))
    assert seen == given


def test_what_is_kept_by_choice_is_no_warning() -> None:
    backend = compiler(forms="expanded")
    model, (x, rows) = Toy().eval(), decode_inputs()
    with torch.no_grad():
        got = compiled(model, backend)(x, rows)
        torch.testing.assert_close(got, model(x, rows), rtol=0, atol=0)
    assert backend.reports[0].kept == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("0"), WeightError("no values"), *also("combination", RuntimeError("the pass broke"))]
)
def test_a_failure_falls_back_with_its_reason_or_is_raised_when_strict(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(pipeline, "run", broken)
    model, (x, rows) = Toy().eval(), decode_inputs()
    backend = compiler()
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match=str(error)):
        torch.testing.assert_close(compiled(model, backend)(x, rows), model(x, rows), rtol=0, atol=0)
    assert backend.failures == [error]
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=str(error)):
        compiled(model, compiler(strict=True))(x, rows)


def test_without_a_compiler_graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found(*_: Any, **__: Any) -> Any:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr(compile_fx, "compile_fx", none_found)
    model, (x, rows) = Toy().eval(), decode_inputs(cached=300)
    backend = Compiler(Options())
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match=r"no C\+\+ compiler"):
        torch.testing.assert_close(compiled(model, backend)(x, rows), model(x, rows), rtol=1e-4, atol=1e-5)
    assert backend.reports[0].absorbed == 1
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(InductorError):
        compiled(model, Compiler(Options(strict=True)))(x, rows)


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        compiled(Toy().eval(), compiler())(*decode_inputs())


@pytest.mark.parametrize("fold", ["auto", "always"])
def test_a_fold_that_fails_costs_the_fold_not_the_absorption(fold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise WeightError("cannot be folded")

    monkeypatch.setattr(folds, "compute", refuse)
    if fold == "auto":  # decide like a cost model that likes folding
        real = pipeline.run
        monkeypatch.setattr(
            pipeline,
            "run",
            lambda p, o, n, **how: real(p, o if o.fold == "never" else Options(lowering="aten", fold="always"), n),
        )
    backend = compiler(fold=fold)
    model, (x, rows) = Toy().eval(), decode_inputs()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(model, backend)(x, rows), model(x, rows), rtol=1e-5, atol=1e-5)
    assert [r.absorbed for r in backend.reports] == ([1] if fold == "auto" else [])
    assert any("cannot be folded" in str(w.message) for w in caught) == (fold == "always")
