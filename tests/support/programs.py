"""Programs for the pass tests: capturing small functions and modules, running them, comparing results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.capture import capture
from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.canonical import views
from mla_compile.passes.cost.cost import default_device
from mla_compile.passes.ir.axes import Atom, axis_size, flatten
from mla_compile.passes.ir.walk import remove_dead_code, weight_nodes
from mla_compile.passes.linear.analysis import LinearMap, LinearMaps, Piece
from mla_compile.passes.verify.comparison import Comparison
from mla_compile.pipeline.analyses import Judgement, canonicalize
from mla_compile.pipeline.manager import Analyses
from mla_compile.runtime.folds import compute

OP = "mla_compile.decode_attention.default"


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape)), dtype=dtype)


def trace(fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Program:
    """``fn(*inputs, *weights)`` as a Program whose operators are the ones ``fn`` calls, none rewritten by export."""
    gm = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(*inputs, *weights)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")][len(inputs) :]
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    gm.recompile()
    fake = next(n.meta["val"].fake_mode for n in gm.graph.nodes if "val" in n.meta)
    return Program(gm, weights=dict(zip(names, weights, strict=True)), fake_mode=fake)


LEGAL = Judgement("absorbed", "never", device=default_device("cpu"))
"""Whether each attention may be absorbed."""


def canonical(program: Program) -> fx.Graph:
    """The graph of a program as the analyses read it."""
    canonicalize(Analyses(program))
    program.gm.recompile()
    return program.gm.graph


def export(module: nn.Module, inputs: Sequence[Any], dynamic: Any = None) -> Program:
    """A module as a Program, through torch.export and the door that users take."""
    torch._ops.reset_cached_ops()  # of all operators of this process, through which torch looks for each one it traces
    with torch.no_grad():
        exported = torch.export.export(module.eval(), tuple(inputs), dynamic_shapes=dynamic)
    return capture.from_exported(exported)


def run(program: Program, *inputs: Any) -> list[torch.Tensor]:
    """The caller's outputs of a program that was captured from an ExportedProgram."""
    specs = program.capture.original.graph_signature.input_specs
    state = {**program.capture.original.state_dict, **program.capture.original.constants}
    rest = iter(inputs)
    values = [state[s.target] if s.target is not None else next(rest) for s in specs]
    values += [compute(fold, program.weights) for fold in program.folds]  # type: ignore[arg-type]
    with torch.no_grad():
        return list(program.gm(*values))[len(program.mutations) :]


def optimized(program: Program, **options: Any) -> pipeline.Outcome:
    """The pipeline, with plain ATen and no folds unless asked otherwise; checks that its input stays as it was."""
    before = text(program)
    outcome = pipeline.run(program, Options.parse({"lowering": "aten", "fold": "never", **options}))
    assert text(program) == before, "the program that came in was changed"
    gm = outcome.program.gm
    gm.graph.lint()
    nested = {name for name, _ in gm.named_children()}  # functions that an operator is given
    assert all("val" in n.meta for n in gm.graph.nodes if n.op != "output" and n.target not in nested)
    return outcome


def noted_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Comparison]:
    """The numeric comparisons that are made from now on; those of equal computations are made once."""
    made: list[Comparison] = []
    check = Comparison.check
    monkeypatch.setattr(Comparison, "check", lambda self, *rest: made.append(self) or check(self, *rest))
    return made


def text(program: Program) -> str:
    return str(program.gm.graph)


def calls(program: Program) -> list[str]:
    """The operators of a program in order, ``aten.`` left out."""
    nodes = program.gm.graph.nodes
    return [str(n.target).removeprefix("aten.") for n in nodes if n.op == "call_function" and "getitem" not in n.name]


def codes(outcome: pipeline.Outcome) -> list[Code]:
    return [site.code for site in outcome.report.sites]


def assert_untouched(program: Program, *outcomes: pipeline.Outcome) -> None:
    """Nothing was absorbed, and the graph is what giving operators one spelling alone leaves of it."""
    plain = program.copy()
    canonical(plain)
    remove_dead_code(plain.gm.graph)
    for outcome in outcomes:
        assert outcome.absorbed == 0
        assert text(outcome.program) == text(plain)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the root mean square of what is expected; infinities and NaN must agree exactly."""
    assert actual.shape == expected.shape, f"{list(actual.shape)} for {list(expected.shape)}"
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places"
    finite = expected.isfinite()
    assert torch.equal(actual[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()])
    if not finite.any():
        return 0.0
    scale = expected[finite].double().square().mean().sqrt().clamp(min=1e-30)
    return float((actual[finite].double() - expected[finite].double()).abs().max() / scale)


def absorbed(
    module: nn.Module,
    inputs: Sequence[Any],
    dynamic: Any = None,
    sites: int = 1,
    program: Program | None = None,
    **options: Any,
) -> Program:
    """Every site of ``module`` is absorbed, and the rewritten program returns what the module returns, to 1e-10.

    ``program``: the module's, where it was exported before.
    """
    program = program or export(module, inputs, dynamic)
    outcome = optimized(program, **{"forms": "absorbed", **options})
    assert codes(outcome) == [Code.ABSORBED] * sites, [(s.code, s.reason, s.blame) for s in outcome.report.sites]
    assert outcome.absorbed == sites
    assert_equal(module, outcome.program, inputs)
    return outcome.program


def decide(
    fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], *shapes: Sequence[int], **options: Any
) -> tuple[Program, pipeline.Outcome]:
    """What becomes of the attentions of ``fn(*inputs, *weights)``, whose numbers stay; ``shapes`` of the weights."""
    weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(shapes)]
    program = trace(fn, inputs, weights)
    outcome = optimized(program, **{"forms": "absorbed", **options})
    with torch.no_grad():
        (result,) = outcome.program.gm(*inputs, *weights)
        assert error(result, fn(*inputs, *weights)) < 1e-10
    return program, outcome


def assert_equal(module: nn.Module, program: Program, inputs: Sequence[Any], tolerance: float = 1e-10) -> None:
    with torch.no_grad():
        expected = module(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = run(program, *inputs)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.stride() == e.stride() or a.numel() == 0
        assert error(a, e) < tolerance


def refused(
    module: nn.Module,
    inputs: Sequence[Any],
    code: Code,
    dynamic: Any = None,
    forms: Sequence[str] = ("absorbed",),
    **options: Any,
) -> pipeline.Outcome:
    """The one site of ``module`` gets ``code`` in each of the ``forms``, and nothing is changed."""
    program = export(module, inputs, dynamic)
    outcomes = [optimized(program, **{"forms": form, **options}) for form in forms]
    for outcome in outcomes:
        assert codes(outcome) == [code], [(s.code, s.reason, s.blame) for s in outcome.report.sites]
        assert_equal(module, outcome.program, inputs)
    assert_untouched(program, *outcomes)
    return outcomes[-1]


def one_side(
    module: nn.Module, inputs: Sequence[Any], side: str, code: Code, dynamic: Any = None, **options: Any
) -> pipeline.Outcome:
    """Only ``side`` of the one site is absorbed. The other is refused with ``code`` and computed as it was."""
    program = export(module, inputs, dynamic)
    outcome = optimized(program, **{"forms": "absorbed", **options})
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, (side,)), (site.code, site.parts, site.reason, site.blame)
    (kept,) = site.kept
    assert (kept.part, kept.code) == ("values" if side == "keys" else "keys", code), (kept.code, kept.reason)
    assert_computed_as_before(program, outcome, side)
    assert_equal(module, outcome.program, inputs)
    return outcome


def assert_computed_as_before(program: Program, outcome: pipeline.Outcome, side: str) -> None:
    """What ``side`` leaves alone is made by the nodes that made it, its up-projection at most narrowed to it.

    And it is read: with ``side`` the values, K meets the queries in a product as wide as K, not in the latent.
    """
    plain = program.copy()
    canonical(plain)
    (found,) = find_attention(plain.gm.graph, weight_nodes(plain.gm.graph, plain.weights))
    kept = [p.k.node for p in found.products] if side == "values" else [found.v.node]
    now = {n.name: n for n in outcome.program.gm.graph.nodes}
    for node in kept:
        queue = [node]
        while queue:
            old = queue.pop()
            new = now.get(old.name)
            assert new is not None, f"{old.name} is gone"
            assert new.target == old.target
            for before, after in zip(old.all_input_nodes, new.all_input_nodes, strict=True):
                if after.name == before.name:
                    queue.append(before)
                    continue
                # A narrowed up-projection: of the same shape, one product of a weight with rows that were there.
                value, other = after.meta["val"], before.meta["val"]
                assert value.shape == other.shape
                while "linear" not in str(after.target):
                    (after,) = after.all_input_nodes[:1]
                    assert "einsum" not in str(after.target)


def linear_map(program: Program) -> LinearMap:
    """The linear map of a traced program's only result."""
    views.canonicalize(program.gm.graph)
    graph = program.gm.graph
    maps = LinearMaps(weight_nodes(graph, program.weights), program.fake_mode)
    (result,) = graph.output_node().args[0]
    found = maps.map(result)
    found_reasons.clear()
    found_reasons.update({n.name: s.code for n, s in maps.reasons.items() if n.op != "placeholder"})
    return found


found_reasons: dict[str, str] = {}
"""Node name -> code of every walk that ended at an operator, of the last :func:`linear_map`."""


def evaluate(program: Program, lmap: LinearMap, *arguments: torch.Tensor) -> torch.Tensor:
    """What a linear map claims that the program computes, from the values of all nodes, in float64."""
    values: dict[str, Any] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    with torch.no_grad():
        Recorder(program.gm).run(*arguments)
    (result,) = program.gm.graph.output_node().args[0]
    shape = values[result.name].shape
    parts = [
        sum((_piece_value(p, shape, lmap.axis, s.stop - s.start, values) for p in s.piece.summands), torch.zeros(()))
        for s in lmap.segments
    ]
    if lmap.axis is None:
        return parts[0]
    bounds = [s.start for s in lmap.segments] + [lmap.segments[-1].stop]
    assert bounds[0] == 0
    assert bounds[-1] == shape[lmap.axis]
    assert all(s.stop == after.start for s, after in itertools.pairwise(lmap.segments))
    return torch.cat(parts, lmap.axis)


def _piece_value(piece: Piece, shape: torch.Size, axis: int | None, width: int, values: dict[str, Any]) -> torch.Tensor:
    sizes = [width if k == axis else s for k, s in enumerate(shape)]
    assert [axis_size(a) for a in piece.axes if a] == [s for a, s in zip(piece.axes, sizes, strict=True) if a]
    atoms = list(dict.fromkeys((*flatten(piece.axes), *flatten(piece.source_axes))))
    letter = dict(zip(atoms, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    out = flatten(piece.axes)

    def term(factors: list[tuple[torch.Tensor, Sequence[Atom]]]) -> torch.Tensor:
        seen = {a for _, own in factors for a in own}
        left = ",".join("".join(letter[a] for a in own) for _, own in factors)
        present = [a for a in out if a in seen]
        value = torch.einsum(f"{left}->{''.join(letter[a] for a in present)}", *(f for f, _ in factors))
        return value.reshape([int(a.size) if a in seen else 1 for a in out]).expand([int(a.size) for a in out])

    total = torch.zeros([int(a.size) for a in out], dtype=torch.float64)
    if piece.source is not None:
        source = values[piece.source.name].double()
        own = flatten(piece.source_axes)
        factors: list[tuple[torch.Tensor, Sequence[Atom]]] = [(source.reshape([int(a.size) for a in own]), own)]
        if piece.weight is not None:
            factors.append((piece.weight.expr.evaluate_named(values, torch.float64), piece.weight.atoms))
        total = total + piece.scale * term(factors)
    if piece.bias is not None:
        total = total + term([(piece.bias.expr.evaluate_named(values, torch.float64), piece.bias.atoms)])
    if not piece.defined:
        total = total * float("nan")
    return total.reshape([axis_size(a) for a in piece.axes]).expand(sizes)
