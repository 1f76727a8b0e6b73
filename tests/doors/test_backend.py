from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from mla_compile import pipeline
from mla_compile.backend import mla, reports
from mla_compile.core.program import Fold, Program
from mla_compile.dynamo import compiler as compiling
from mla_compile.dynamo.compiler import Compiler, has_attention
from mla_compile.errors import MlaCompileWarning, OptionError, StaleWeightError, WeightError
from mla_compile.options import Options
from mla_compile.passes.ir.sizes import size
from mla_compile.runtime import choice, folds
from mla_compile.runtime.folds import FoldedWeights
from tests.support.toy import Toy, decode_inputs

ROOT = Path(__file__).resolve().parents[2]


class Plain(nn.Module):
    """Ordinary attention: nothing to absorb."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 5, 4, 8).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def compiler(**options: Any) -> Compiler:
    return Compiler(Options.parse({"codegen": "eager", "lowering": "aten", **options}))


def compiled(model: nn.Module, backend: Compiler, **settings: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **settings)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("lowering", ["aten", "op"])
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


def test_it_is_found_by_name_without_importing_it(tmp_path: Path) -> None:
    info = tmp_path / "mla_compile-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-compile\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nmla = mla_compile.backend:mla\n")
    script = (
        "import sys, torch\n"
        "from tests.support.toy import Toy, decode_inputs\n"
        "assert 'mla' in torch.compiler.list_backends()\n"
        "assert 'mla_compile' not in sys.modules\n"
        "model = Toy().eval()\n"
        "options = {'codegen': 'eager', 'lowering': 'aten'}\n"
        "step = torch.compile(model, backend='mla', options=options)\n"
        "with torch.no_grad():\n"
        "    got, want = step(*decode_inputs()), model(*decode_inputs())\n"
        "torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)\n"
        "from mla_compile.backend import reports\n"
        "print(reports()[-1].absorbed)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_reports_of_the_named_backend_are_kept() -> None:
    before = len(reports())
    with torch.no_grad():
        torch.compile(Toy().eval(), backend=mla, options={"codegen": "eager", "lowering": "aten"})(*decode_inputs())
    assert len(reports()) == min(before + 1, 64)
    assert reports()[-1].absorbed == 1


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowerin": "aten"}, "did you mean 'lowering'"),
        ({"forms": "absorbd"}, "did you mean 'absorbed'"),
        ({"max_autotun": True}, "did you mean 'max_autotune'"),
        ({"verify": 1}, "expected True or False"),
        ({"fold": True}, "expected one of auto, never, always"),
        ({"inductor": 3}, "mapping"),
        ([("fold", "never")], "mapping"),
    ],
)
def test_wrong_options_name_what_was_meant(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.parse(options)


def test_wrong_options_are_raised_even_though_failures_fall_back() -> None:
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="did you mean 'lowering'") as caught:
        torch.compile(Toy().eval(), backend=mla, options={"lowerin": "aten"})(*decode_inputs())
    assert isinstance(caught.value.inner_exception, OptionError)
    with pytest.raises(OptionError, match="no-such-mode"):
        Compiler(Options(), "no-such-mode")


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
        backend = compiler(codegen=codegen, lowering="op")
        y, _ = torch.compile(model, backend=backend)(x, rows)
        assert backend.reports[0].absorbed == 1
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


@pytest.mark.parametrize("error", [RuntimeError("the pass broke"), ZeroDivisionError("0"), WeightError("no values")])
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


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_with_a_symbolic_number_of_queries_each_call_picks(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picked: list[bool] = []
    choose = choice.choose_by_call

    def spy(pays: Any, absorbed: Any, expanded: Any) -> Any:
        return choose(lambda inputs: picked.append(pays(inputs)) or picked[-1], absorbed, expanded)

    monkeypatch.setattr(compiling, "choose_by_call", spy)
    model = Toy().eval()
    backend = compiler(codegen=codegen)
    step = compiled(model, backend, dynamic=True)
    sizes = [(6, 5), (3, 40), (400, 7), (9, 300)]
    with torch.no_grad():
        for queries, cached in sizes:
            x, rows = decode_inputs(cached=cached, queries=queries)
            torch.testing.assert_close(step(x, rows), model(x, rows), rtol=1e-5, atol=1e-5)
    assert len(backend.reports) == 1
    from mla_compile.passes.decide.cost import absorbed_pays
    from tests.support.toy import H, L, N, R, V

    dims = pipeline.Dims(H=H, L=L, R=R, N=N, V=V)
    assert picked == [absorbed_pays(dims, 2, S, S + T) for S, T in sizes]
    assert {*picked} == {True, False}


def test_the_picker_understands_the_shape_expressions_of_torch() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(6, 50), static_shapes=False)
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["val"] = fake
    graph.output(())
    program = Program(torch.fx.GraphModule({}, graph))
    S, T = (size.node.expr for size in fake.shape)
    site = pipeline.SiteCost(pipeline.Dims(H=4, L=16, R=6, N=12, V=10), 2, FloorDiv(S * S, S), T + 1)
    pays = choice.picker(program, [site, site])
    assert pays([torch.ones(1, 50)])
    assert not pays([torch.ones(500, 50)])
    assert choice.pays_as_traced(program, [site])
    unknown = pipeline.SiteCost(site.dims, 2, S, sympy.Symbol("u0", integer=True))  # counts as UNSEEN
    pays = choice.picker(program, [unknown])
    assert pays([torch.ones(1, 50)])
    assert not pays([torch.ones(500, 50)])
    assert choice.pays_as_traced(program, [unknown])
    assert not choice.pays_as_traced(program, [pipeline.SiteCost(site.dims, 2, S + 100, unknown.T)])


def test_the_picker_reads_sizes_by_the_name_that_guards_give_them() -> None:
    # Two caches of one length are two symbols to torch, as they are after a recompilation.
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    earlier, later = (mode.from_tensor(torch.ones(50, 6), static_shapes=False).shape[0] for _ in range(2))
    queries = mode.from_tensor(torch.ones(50, 7), static_shapes=False)
    assert earlier + queries.shape[0] == later + queries.shape[0]  # a guard
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["val"] = queries
    graph.placeholder("y").meta["val"] = later  # the older name, which the passes use, is no input
    graph.output(())
    program = Program(torch.fx.GraphModule({}, graph))
    S, T = size(queries.shape[0]), size(later)
    assert earlier.node.expr == T
    site = pipeline.SiteCost(pipeline.Dims(H=4, L=16, R=6, N=12, V=10), 2, S, T + S)
    pays = choice.picker(program, [site])
    assert pays([torch.ones(5, 7), 50])
    assert not pays([torch.ones(500, 7), 50])
    assert not choice.pays_as_traced(program, [site])  # 50 queries


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_context_whose_length_is_computed_in_the_graph() -> None:
    class Pruned(Toy):
        def forward(self, x: Any, rows: Any, kept: Any = None) -> Any:
            return self.attend(x, rows.index_select(1, kept.nonzero()[:, 0]), None)

    model = Pruned().eval()
    backend = compiler(verify=True, strict=True)
    step = compiled(model, backend, dynamic=True)
    kept = torch.arange(19) % 3 != 0
    with torch.no_grad():
        for queries, cached in ((3, 19), (40, 19), (2, 11)):
            x, rows = decode_inputs(cached=cached, queries=queries)
            torch.testing.assert_close(step(x, rows, kept[:cached]), model(x, rows, kept[:cached]))
    for report in backend.reports:
        assert report.absorbed == 1
        assert report.sites[0].precision_ratio is not None, "not verified"


def folding(model: Toy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[int]]:
    """``model`` compiled with folds that count how often they are computed."""
    counts: list[int] = []
    compute = folds.compute

    def counted(fold: Fold, live: Any) -> torch.Tensor:
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


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("change", [scale_in_place, scale_data, replace_parameter, assign_data, load])
def test_folded_weights_follow_the_live_ones(change: Any, codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if codegen == "inductor" and change in (assign_data, load):
        pytest.skip("the same code as with codegen=eager")
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
    program.folds.append(Fold("folded", compute, tuple(names)))
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


def test_hitting_the_recompile_limit_is_a_warning() -> None:
    class Varying(Toy):
        def forward(self, x: torch.Tensor, rows: torch.Tensor, flag: str) -> Any:  # a new graph for every string
            return super().forward(x * {"0": 1.0, "1": 2.0, "2": 3.0}[flag], rows)

    step = torch.compile(Varying().eval(), backend=compiler())
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        step(*decode_inputs(), "0")
        step(*decode_inputs(), "1")
        with pytest.warns(MlaCompileWarning, match="runs it uncompiled"):
            step(*decode_inputs(), "2")


def test_the_limit_of_code_that_is_not_ours_is_not_reported() -> None:
    step = torch.compile(lambda x, flag: x * {"0": 1.0, "1": 2.0, "2": 3.0}[flag], backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for flag in "012":
            step(torch.ones(1), flag)
