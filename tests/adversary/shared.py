"""Mutants of attentions over rows that all heads share, in one memory or two, with sinks and lists over one of them.

The operator that replaces such an attention has no weight to fold, so a step anywhere on the way of keys, values,
scores, sinks or lists has to end it or to stay in front of it: numbers decide which. The steps are those of
:mod:`tests.adversary.mutations`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.capture import capture
from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.ir.graph import is_tensor, packet
from mla_compile.report.report import Report
from tests.adversary.bases import behind, verdicts
from tests.adversary.check import EXACT, THROUGH_FLOAT32, reproducible, same_numbers
from tests.adversary.mutations import MUTATIONS, Mutation
from tests.adversary.oracle import SOFTMAX, recorded
from tests.adversary.places import Edge, Refused, apply, choose, edges
from tests.support.generated_rows import RowsCase, SharedRows, inputs_of, rows_case
from tests.support.programs import canonical
from tests.support.reasons import told

PLACES = ("keys", "values", "both", "queries", "scores", "probs", "mask", "anywhere")
CORES = (*SOFTMAX, torch.ops.aten.scaled_dot_product_attention)
STEPS = sorted(name for name, one in MUTATIONS.items() if name != "mask_from_keys" and one.places != ("weights",))


@dataclass(frozen=True)
class RowsBase:
    """A captured attention that becomes the operator, as :mod:`tests.adversary.places` reads a base."""

    case: RowsCase
    program: Program
    plan: Any

    def inputs(self, draw: int) -> list[torch.Tensor]:
        """Random queries and rows."""
        return inputs_of(replace(self.case, seed=self.case.seed + draw), (1.0, 3.0)[draw % 2])


def bases(count: int, start: int) -> Iterator[RowsBase]:
    """``count`` bases in float64; sizes of every second one are equal where they may be."""
    found = 0
    while found < count:
        case = replace(rows_case(start, legal=True), half=False)
        if found % 2:
            n = 4 if case.values == "middle" else 2 * case.G
            case = replace(case, B=n, T=max(n, case.S), H=n, W=n, C=n if case.C else 0, k=min(case.k, n))
        start += 1
        base = base_of(case)
        if base is not None:
            found += 1
            yield base


@functools.lru_cache
def pool(count: int, start: int) -> tuple[RowsBase, ...]:
    """The bases, made once."""
    return tuple(bases(count, start))


def base_of(case: RowsCase) -> RowsBase | None:
    """The captured case, if its heads are found to share rows."""
    given = inputs_of(case)
    module = SharedRows(case).eval()
    with torch.no_grad():
        traced = make_fx(lambda *x: (module(*x),), pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(
            *given
        )
        program = capture.from_graph_module(traced)
    canonical(program)
    (verdict,) = verdicts(program)
    if verdict.code is not Code.SHARED_ROWS:
        return None
    rows = [SimpleNamespace(piece=SimpleNamespace(source=n)) for n in program.placeholders[1 : len(given)]]
    return RowsBase(case, program, SimpleNamespace(site=verdict.site, keys=rows, vals=rows))


def mutant(base: RowsBase, mutation: Mutation, rng: random.Random) -> Report:
    """Make a mutant, check its numbers and what is said of it; raises :class:`Refused` where the step does not fit."""
    place = rng.choice(PLACES)
    edge = choose(rng, _anywhere(base) if place == "anywhere" else edges(base, place))  # type: ignore[arg-type]
    program = apply(base, edge, mutation.make(rng, base, edge))  # type: ignore[arg-type]
    try:
        # Sequences may be mixed instead of tokens, and rows as wide as what all heads share, which the check of reasons
        # does not watch.
        return checked(base, program, {Code.TOKEN_MIXING, Code.COST_LATENT_WIDE, *mutation.codes})
    except Refused:
        raise
    except Exception as error:  # of whatever kind: it is told of which mutant
        raise AssertionError(
            f"{mutation.name} on {place} of {base.case!r} at {edge}: {type(error).__name__}: {error}"
        ) from error


def _anywhere(base: RowsBase) -> list[Edge]:
    """Single uses of what the attention is computed from: parts of lists and masks, sinks, rows."""
    before = behind(base.plan.site.node)
    nodes = sorted(n for n in before if n.op == "call_function" and is_tensor(n))
    return [Edge(n, (user,)) for n in nodes for user in n.users if user in before]


def checked(base: RowsBase, program: Program, true: Collection[Code] = ()) -> Report:
    """The report on a mutant; raises AssertionError on a wrong number or a false reason; ``true``: codes let pass."""
    if _lacks_numbers(program, base.inputs(0)):
        raise Refused("its scores are no numbers")
    outcome = pipeline.run(program, Options(lowering="op", codegen="eager"))
    allowed = THROUGH_FLOAT32 if base.case.float32 else EXACT
    for draw in range(3):
        values = base.inputs(draw)
        try:
            expected = _run(program, values)
        except (RuntimeError, IndexError):
            raise Refused("it does not run") from None
        for actual, want in zip(_run(outcome.program, values), expected, strict=True):
            same_numbers(actual, want, allowed, f"draw {draw}")
    names = [n.name for n in program.placeholders]
    given = dict(zip(names, base.inputs(0), strict=False))
    try:
        false = [str(one) for one in told(program, given, base.case.B) if not one.true and one.code not in true]
    except RuntimeError:
        raise Refused("the rows that the check of reasons puts in have other strides") from None
    assert not false, false
    return outcome.report


def _lacks_numbers(program: Program, values: list[torch.Tensor]) -> bool:
    """Whether scores are made of NaN: what a kernel makes of a mask of NaN is not promised."""
    try:
        with reproducible():  # which of the numbers a dropout takes, it takes when they are compared, too
            seen = recorded(program, [*values, *_weights(program, len(values))])
    except (RuntimeError, IndexError):
        raise Refused("it does not run") from None
    # A mutation may have put a softmax of its own before that of the attention.
    before = {n for core in program.gm.graph.nodes if packet(core) in CORES for n in behind(core) - {core}}
    return any(isinstance(seen.get(n), torch.Tensor) and bool(seen[n].isnan().any()) for n in before)


def _weights(program: Program, given: int) -> list[torch.Tensor]:
    return [program.weights[n.name] for n in program.placeholders[given:]]


def _run(program: Program, values: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad(), reproducible():
        given = [v.clone() for v in values]
        return [r.clone() for r in fx.Interpreter(program.gm).run(*given, *_weights(program, len(given)))]
