"""One mutant: made, compiled, compared with itself, and its verdict with the oracle's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile import pipeline
from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.ir.axes import axis_size
from mla_compile.report.report import SiteReport
from mla_compile.runtime.folds import compute
from tests.adversary.bases import Base, verdicts
from tests.adversary.mutations import Mutation
from tests.adversary.oracle import attends, claimed_rank, rank
from tests.adversary.places import Refused, apply, choose, edges
from tests.support.programs import canonical
from tests.support.reasons import told

EXACT = 1e-9  # relative to the largest value
THROUGH_FLOAT32 = 3e-5


@dataclass(frozen=True)
class Found:
    """What came of one mutant; ``rank`` is the oracle's where it was asked, a legal one has ``limit`` at the most."""

    name: str
    place: str
    edge: str
    base: str
    site: SiteReport
    rank: int
    limit: int

    @property
    def legal(self) -> bool:
        return self.rank <= self.limit


def mutant(base: Base, mutation: Mutation, rng: random.Random) -> Found:
    """Makes one mutant of ``base`` and checks it; raises :class:`Refused` where the mutation does not fit."""
    place = rng.choice(mutation.places)
    edge = choose(rng, edges(base, place))
    program = apply(base, edge, mutation.make(rng, base, edge))
    said = f"{mutation.name} on the {place} of {base.case!r}, past {base.past}, symbolic {base.symbolic}, at {edge}"
    try:
        return _checked(base, program, mutation, place, str(edge.node), rng)
    except Refused:
        raise
    except Exception as error:  # of whatever kind: it is told of which mutant
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error


def _checked(base: Base, program: Program, mutation: Mutation, place: str, edge: str, rng: random.Random) -> Found:
    forms = rng.choice(("absorbed", "absorbed", "auto"))
    lowering = rng.choice(("op", "aten"))
    options = Options(forms=forms, fold=base.case.fold, lowering=lowering, codegen="eager")  # type: ignore[arg-type]
    outcome = pipeline.run(program, options)
    compare(base, program, outcome.program)
    reports = outcome.report.sites
    plain = program.copy()
    canonical(plain)
    if not reports and not attends(plain):
        raise Refused("no softmax lies between two products any more")
    assert reports, "an attention that nothing is said about"
    site = reports[0]
    limit = sum(_width(r) for r in (base.plan.latent, base.plan.rope, base.plan.values)) + 1
    kept = site.code == "cost_prefill" and forms == "auto"
    of_rows = place in ("keys", "values", "both", "weights")
    whole = site.verdict == "absorbed" and not site.parts
    found = rank(base, program, limit) if of_rows and (mutation.legal or not whole) else 0
    for verdict in verdicts(plain) if outcome.absorbed or kept else ():
        if verdict.absorb and verdict.plan is not None:
            own = sum(_width(r) for r in verdict.plan.rows) + 1
            have = claimed_rank(base, plain, verdict.plan, own)
            assert have <= own, f"absorbed as rows of {own - 1} values, but their rank is {have} or more"
    if found > limit and not mutation.legal:
        given = dict(zip((node.name for node in program.placeholders), base.inputs(0), strict=True))
        true = {*mutation.codes, *_true_of(base)}
        # Columns that stay are rows of every head, whatever was done to them.
        unproved = (t for t in told(program, given, base.case.B) if not t.true and t.code not in true)
        untrue = [str(t) for t in unproved if t.code != Code.PER_HEAD_ROPE or not t.part.startswith("some columns")]
        assert not untrue, "; ".join(untrue)
    elif mutation.outside and not of_rows and not kept:
        wrong = [f"{code} ({words})" for _, code, words in said(site) if code not in mutation.outside]
        assert not wrong, f"{', '.join(wrong)} is said"
    if mutation.legal:
        assert found <= limit, f"the oracle finds a legal mutation illegal: rank {found}, limit {limit}"
        assert site.verdict == "absorbed" or kept, f"{site.verdict} ({site.code}): {site.reason} at {site.blame}"
    return Found(mutation.name, place, edge, repr(base.case), site, found, limit)


def _true_of(base: Base) -> set[Code]:
    """Codes that are true of a base whose hidden state, no wider than what is made of it, may be the source."""
    case = base.case
    found = {Code.NOT_MLA} if case.D <= case.L else set()
    if case.R and case.D <= case.R:
        found |= {Code.POSITION_DEPENDENT, Code.PER_HEAD_ROPE, Code.COST_LATENT_WIDE, Code.NONLINEAR}
    return found


def said(site: SiteReport) -> list[tuple[str, Code, str]]:
    """The codes of what is not absorbed: of which part, the code, and in words."""
    if site.verdict != "absorbed":
        return [("both", site.code, f"{site.reason} at {site.blame}")]
    return [(kept.part, kept.code, f"{kept.reason} at {kept.blame}") for kept in site.kept]


def _width(rows: Any) -> int:
    return 0 if rows is None else int(axis_size((*rows.width, *rows.heads)))


def compare(base: Base, program: Program, rewritten: Program) -> None:
    """Raises AssertionError where the rewritten program does not return what ``program`` does."""
    folded = [compute(f, rewritten.weights) for f in rewritten.folds]  # type: ignore[arg-type]
    for draw, past in ((0, base.past), (1, base.past), (2, base.past + 3), (3, base.past + 1)):
        if past != base.past and not base.past:
            continue
        values = base.inputs(draw, past)
        if past != base.past and not base.takes(values):
            continue
        try:
            expected = _run(program, values)
        except (RuntimeError, IndexError):
            if past == base.past:
                raise Refused("it does not run") from None
            continue  # the mutation holds for the traced sizes only
        if any(e.isnan().any() for e in expected):
            with _Zeros():
                defined = _run(program, values)
            if any(not torch.equal(a.isnan(), e.isnan()) for a, e in zip(defined, expected, strict=True)):
                raise Refused("it reads memory that nobody wrote, so no number is right")
        actual = _run(rewritten, [*values, *folded])
        assert len(actual) == len(expected)
        for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
            same_numbers(a, e, THROUGH_FLOAT32 if base.case.softmax == "cast" else EXACT, f"output {k} of draw {draw}")


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Dropout draws the same numbers every time, and memory that nobody wrote holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Zeros(TorchDispatchMode):
    """Memory that nobody wrote holds zeros."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


_EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like)


def _run(program: Program, values: list[Any]) -> list[Tensor]:
    with torch.no_grad(), reproducible():
        copies = [v.clone() if isinstance(v, Tensor) else v for v in values]
        return [r.clone() for r in program.gm(*copies) if isinstance(r, Tensor)]


def same_numbers(actual: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    """Raises AssertionError where two tensors differ by more than ``allowed``, or in shape, dtype or NaN."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places"
    finite = expected.isfinite() & actual.isfinite()
    assert torch.equal(finite, expected.isfinite()), f"{what}: infinite in other places"
    if finite.any():
        size = max(float(expected[finite].abs().max()), 1e-6)
        error = float((actual - expected)[finite].abs().max())
        assert error <= allowed * size, f"{what}: relative error {error / size:.2e}"
