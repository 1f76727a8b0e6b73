"""Compare two nodes numerically, in float64 and in the model's own precision. Equal comparisons are made once.

The untouched and the rewritten node are each computed from the same random values, in float64 and in the model's dtype.
In float64, both nodes must agree up to rounding. This checks the proof independently. In the model's dtype, the error
of the rewritten node must not exceed a multiple of the original's error.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from mla_compile.passes.ir.graph import val
from mla_compile.passes.verify.computation import Computations
from mla_compile.passes.verify.evaluate import Evaluation, Listed, draw

EXACT = 1e-8
"""Largest relative difference in float64 that rounding can explain.

Float64 has 16 digits; sums over a context and a softmax of large scores lose several of them. A wrong formula differs
in the first digits."""
ALLOWED = 1.5
"""The largest error of the rewritten site, as a multiple of the original's error (plus two units in the last place).

The absorbed form rounds at other places than the original, but no more often. So the true ratio is near 1. Sampled
quantiles scatter around the true ratio.
"""
ROWS, TRIALS, MORE = 128, 16, 128
"""Inputs are drawn until the errors of ``ROWS`` output rows are known, or until ``TRIALS`` draws were made.

Of 128 rows, a dozen lie above the 0.9 quantile. A decode step of one head gives only one row per draw. The 0.9 quantile
of few rows depends on luck, so a site fails only after ``MORE`` draws.
"""
BUDGET_FLOPS, BUDGET_BYTES = 1e11, 2**31
"""The budget of one comparison: FLOPs, and 2 GiB. Sites with a larger fixed context are reported as not checked."""
LONG = 613
"""A context longer than any block of the kernels, for graphs whose context is symbolic."""

_SCALES = (1.0, 8.0)  # ordinary inputs, and large inputs whose softmax is near one-hot


@dataclass(frozen=True)
class Check:
    """The result of a comparison: the ratio of errors (None if unknown) and the problem (None if there is none)."""

    ratio: float | None
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Run:
    """The sizes at which two nodes are compared. ``counts`` and ``lists``: arguments of :func:`draw`, by input name."""

    sizes: Mapping[sympy.Symbol, int]
    counts: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, Listed] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison depends on, except the values of weights.

    Attributes:
        old, new: the node of the untouched graph, and the node that must compute the same.
        boundary: the nodes of the untouched graph whose values are drawn, by name; both nodes are computed from these.
        runs: the sizes to compare at, in order.
        note: what is not compared, and why.
    """

    old: fx.Node
    new: fx.Node
    boundary: Mapping[str, fx.Node]
    runs: Sequence[Run]
    note: str | None = None

    def key(self, weights: Mapping[str, torch.Tensor | None]) -> Hashable:
        """Return a key that is equal for comparisons of the same computations on different tensors.

        The key includes everything that the comparison reads. Layers have different size symbols, because each cache
        has its own symbols. So a symbol is identified by the place of its first appearance and by its value in each
        run.
        """
        known = Computations(self.boundary, weights, self.runs[0].sizes if self.runs else {})
        computed = known.of(self.old), known.of(self.new)
        runs = tuple(
            (
                tuple(run.sizes.get(symbol) for symbol in known.symbols),
                tuple(run.counts.get(name) for name in known.given),
                tuple(run.lists.get(name) for name in known.given),
            )
            for run in self.runs
        )
        return computed, runs, self.note

    def check(self, weights: Mapping[str, torch.Tensor | None], seed: int = 0) -> Check:
        """Draw values and compare the nodes at the sizes of each run; stop at the first run with a problem."""
        ratios: list[float] = []
        for run in self.runs:
            found = self._at(run, weights, seed)
            if found.problem is not None:
                return found
            ratios += [] if found.ratio is None else [found.ratio]
        return Check(max(ratios, default=None), note=self.note)

    def _at(self, run: Run, weights: Mapping[str, torch.Tensor | None], seed: int) -> Check:
        old, new = self.old, self.new
        ours: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []
        rounds = val(old).dtype != torch.float64  # a float64 model is as precise as the truth and shows no error
        for trial in range(MORE):
            generator = torch.Generator().manual_seed(seed + trial)
            scale = _SCALES[trial % len(_SCALES)]
            given = {
                name: draw(node, run.sizes, scale, generator, run.counts.get(name), run.lists.get(name))
                for name, node in self.boundary.items()
            }
            runs = [Evaluation(weights, given, run.sizes, seed + trial, dtype) for dtype in (torch.float64, None)]
            truth, reference = (run.value(old) for run in runs)
            exact, result = (run.value(new) for run in runs)
            difference = _distance(exact, truth)
            # Written so that NaN fails.
            if not difference <= EXACT:
                return Check(None, f"differs from the original by {difference:.1e} in float64")
            if not torch.isfinite(result)[torch.isfinite(reference)].all():
                return Check(None, "gives inf or nan where the original does not")
            ours.append(_row_errors(result, truth, reference))
            theirs.append(_row_errors(reference, truth, reference))
            if trial + 1 >= len(_SCALES) and sum(len(e) for e in ours) >= ROWS:
                break
            # Before the last draw, the errors are judged only once. If they were judged after every draw, a wrong node
            # could pass by chance.
            if trial + 1 == TRIALS and (not rounds or _judged(ours, theirs, old).problem is None):
                break
        return _judged(ours, theirs, old) if rounds else Check(None)


class Checks:
    """Runs each kind of comparison once and reuses the result for equal computations."""

    def __init__(self, weights: Mapping[str, torch.Tensor | None]) -> None:
        self.weights = weights
        self._done: dict[Hashable, Check] = {}

    def check(self, comparison: Comparison) -> Check:
        key = comparison.key(self.weights)
        if key not in self._done:
            self._done[key] = comparison.check(self.weights)
        return self._done[key]


def _judged(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], old: fx.Node) -> Check:
    problem, ratio = _judge_errors(torch.cat(list(ours)), torch.cat(list(theirs)), torch.finfo(val(old).dtype).eps)
    return Check(ratio, problem)


def _judge_errors(ours: torch.Tensor, theirs: torch.Tensor, eps: float) -> tuple[str | None, float | None]:
    """Return the problem with the errors of the rewritten rows, if any, and the ratio of the median errors.

    Errors are heavy-tailed (a softmax near a tie is as good as a coin toss), so quantiles are compared, not means.
    """
    for quantile in (0.5, 0.9):
        a, b = float(ours.quantile(quantile)), float(theirs.quantile(quantile))
        if a > ALLOWED * b + 2 * eps:
            return f"has an error of {a:.1e} where the original has {b:.1e}", a / b if b else math.inf
    median = float(theirs.median())
    return None, float(ours.median()) / median if median > 0 else None


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative RMS difference over finite entries of the truth ``b``; inf if ``a`` is not finite there."""
    finite = torch.isfinite(b)
    if not torch.isfinite(a)[finite].all():
        return math.inf
    norm = b[finite].square().mean().sqrt() if finite.any() else b.new_zeros(())
    error = (a[finite] - b[finite]).square().mean().sqrt() if finite.any() else norm
    return float(error / norm) if norm > 0 else float(error)


def _row_errors(result: torch.Tensor, truth: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every row of features that is finite in ``where`` and in the truth."""
    finite = (torch.isfinite(where) & torch.isfinite(truth)).all(-1)
    truth, result = truth[finite], result[finite].double()
    norm = truth.norm(dim=-1)
    errors: torch.Tensor = (result - truth).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float64).tiny)
    return errors[norm > 0]
