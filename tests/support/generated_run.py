"""Runs a generated module through a prompt and some decode steps: compiled, in eager mode, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.core.guards import guards_of
from mla_compile.core.program import Program
from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options
from mla_compile.report.report import Report
from tests.support.generated_module import GeneratedMLA
from tests.support.generator import Case

Call = Callable[..., tuple[Tensor, ...]]
Stepper = Callable[[tuple[Any, ...]], tuple[tuple[Tensor, ...], Report | None]]
Results = tuple[Tensor, ...]
KeepOf = Callable[[Case, Tensor], Tensor | None]


def side_by_side(
    module: GeneratedMLA, plain: GeneratedMLA, exact: GeneratedMLA, options: Options, keep_of: KeepOf | None = None
) -> Iterator[tuple[int, Results, Results, Results, Report | None]]:
    """After each call: the tokens so far, what ``module`` compiled, ``plain`` and ``exact`` returned, and the report.

    ``exact`` is a copy in float64. Each goes on with the state that it has returned itself. ``keep_of``: what they are
    given as ``keep``, if not :func:`causal_keep`.
    """
    case = module.case
    step = _DOORS[case.door](module, options)
    generator = torch.Generator().manual_seed(case.seed)
    states = [m.empty_state() for m in (module, plain, exact)]
    done = 0
    for count in (case.T, *[case.chunk] * case.steps):
        x = torch.randn(case.B, count, case.D, generator=generator, dtype=torch.float64).to(module.w_c.dtype)
        positions = torch.arange(done, done + count)
        keep = (keep_of or causal_keep)(case, positions)
        for m in (module, plain, exact):
            m.start = done
        got, report = step((x, positions, keep, states[0]))
        eager = plain(x, positions, keep, states[1])
        truth = exact(x.double(), positions, keep, states[2])
        for index, result in enumerate((got, eager, truth)):
            states[index] = result[1 : 1 + len(states[index])]
        done += count
        yield done, got, eager, truth, report


def captured_step(module: GeneratedMLA) -> tuple[Program, dict[str, Any]]:
    """A decode step after a prompt, as a program, and the inputs of that step by name."""
    case, state = module.case, module.empty_state()
    for module.start, count in ((0, case.T), (case.T, case.chunk)):
        x = torch.randn(case.B, count, case.D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        positions = torch.arange(module.start, module.start + count)
        keep = causal_keep(case, positions)
        given = [v for v in (x, positions, keep, *state) if v is not None]
        with torch.no_grad():
            state = module(x, positions, keep, state)[1 : 1 + len(state)]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        x, positions, *rest = values
        return module(x, positions, None if keep is None else rest.pop(0), tuple(rest))

    with torch.no_grad():
        traced = make_fx(call, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    program = capture.from_graph_module(traced)
    return program, dict(zip((node.name for node in program.placeholders), given, strict=True))


def causal_keep(case: Case, positions: Tensor) -> Tensor | None:
    """[B,S,T], True where query s may see key t: causal, not left padding, not the unused end of a buffer."""
    if case.mask in ("none", "is_causal"):
        return None
    length = case.capacity if case.cache in ("index_copy", "slice") else int(positions[-1]) + 1
    keys = torch.arange(length)
    keep = (keys <= positions[:, None]).expand(case.B, -1, -1)
    first = torch.arange(case.B) % 3 if case.padded else torch.zeros(case.B, dtype=torch.long)
    return keep & (keys >= first[:, None, None])


def options_of(case: Case) -> Options:
    return Options(forms=case.forms, fold=case.fold, lowering=case.lowering, codegen="eager", strict=True)  # type: ignore[arg-type]  # drawn from the same names


def through_dynamo(module: GeneratedMLA, options: Options) -> Stepper:
    """torch.compile with our backend: static shapes first, symbolic ones from the second decode step on."""
    torch._dynamo.reset()
    compiler = Compiler(options)
    call = torch.compile(module, backend=compiler)

    def step(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Report | None]:
        result = call(*args)
        return result, compiler.reports[-1] if compiler.reports else None

    return step


def through_optimize(module: GeneratedMLA, options: Options) -> Stepper:
    """``mla_compile.optimize``, which compiles when the module is called."""
    torch._dynamo.reset()
    fast: Any = mla_compile.optimize(module, **{f.name: getattr(options, f.name) for f in fields(options)})

    def step(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Report | None]:
        fast.start = module.start
        return fast(*args), fast.mla_report

    return step


def through_tracing(module: GeneratedMLA, options: Options) -> Stepper:
    """Tracing and our passes without Dynamo. One graph per shape, or one symbolic graph while its guards hold."""
    symbolic = module.case.door == "symbolic"
    known: list[tuple[fx.GraphModule, list[fx.Node], Call, Report]] = []

    def step(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Report | None]:
        x, positions, keep, state = args
        flat = [v for v in (x, positions, keep, *state) if v is not None]

        def call(*values: Tensor) -> tuple[Tensor, ...]:
            x, positions, *rest = values
            keep_ = None if keep is None else rest.pop(0)
            return module(x, positions, keep_, tuple(rest))

        for traced, inputs, run, report in known:
            if symbolic and module.case.cache != "slice" and _guards_hold(traced, inputs, flat):
                return run(*flat), report
        mode = "symbolic" if symbolic else "fake"
        traced = make_fx(call, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(*flat)
        outcome = pipeline.run(capture.from_graph_module(traced), options)
        folded = {f.placeholder: f.compute(_live(outcome.program, f.weights)) for f in outcome.program.folds}
        run = emit.to_plain_graph_module(outcome.program, folded)
        known.append((traced, traced.graph.find_nodes(op="placeholder"), run, outcome.report))
        return run(*flat), outcome.report

    return step


_DOORS = {
    "dynamo": through_dynamo, "optimize": through_optimize, "trace": through_tracing, "symbolic": through_tracing,
}  # fmt: skip


def _guards_hold(traced: fx.GraphModule, inputs: list[fx.Node], values: list[Tensor]) -> bool:
    fakes = [n.meta["val"] for n in inputs]
    if len(fakes) != len(values) or any(f.dim() != v.dim() for f, v in zip(fakes, values, strict=True)):
        return False
    return guards_of(traced.shape_env, fakes, ignore_static=False)(values)  # type: ignore[arg-type]  # make_fx sets it


def _live(program: Program, names: tuple[str, ...]) -> dict[str, Tensor]:
    live = {}
    for name in names:
        tensor = program.weights[name]
        assert tensor is not None
        live[name] = tensor
    return live
