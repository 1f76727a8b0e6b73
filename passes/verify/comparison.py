"""Two nodes compared by their numbers, in float64 and in the model's own precision; equal comparisons are made once.

Both nodes are computed from the same random values, four times: the untouched and the rewritten one, in float64 and as
they are. In float64 the two must agree to rounding, which is the proof obligation seen from the outside. In the model's
dtype the rewritten error may not exceed what the original allows.
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
"""Largest error of the rewritten site, in errors of the original (plus two units in the last place).

The absorbed form rounds at other places than the original, and no more often: the ratio is near 1, and quantiles of
a sample scatter around it."""
ROWS, TRIALS, MORE = 128, 16, 128
"""Rows of output wanted for a comparison of errors, and the most draws of inputs made to get them.

The 0.9 quantile of 128 rows has a dozen rows beyond it. A decode step of one head has a single row per draw, so the
draws are limited too. But the 0.9 quantile of two dozen rows is luck: it takes ``MORE`` draws to condemn a site."""
BUDGET_FLOPS, BUDGET_BYTES = 1e11, 2**31
"""What one comparison may cost: FLOPs, and 2 GiB. Sites with a larger fixed context are reported as not checked."""
LONG = 613
"""A context longer than any block of the kernels, for graphs whose context is symbolic."""

_SCALES = (1.0, 8.0)  # ordinary inputs, and large ones whose softmax is near one-hot


@dataclass(frozen=True)
class Check:
    """What a comparison found: the ratio of errors (None if not known), and what is wrong (None if nothing)."""

    ratio: float | None
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Run:
    """The sizes at which two nodes are compared; which inputs are ``counts`` and ``lists``: see :func:`draw`."""

    sizes: Mapping[sympy.Symbol, int]
    counts: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, Listed] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All that a comparison depends on, besides the values of weights.

    Attributes:
        old, new: the node of the untouched graph, and the one that is to compute the same.
        boundary: the nodes of the untouched graph whose values are drawn, by name; both nodes are computed from these.
        runs: the sizes, one after the other.
        note: what is not compared, and why.
    """

    old: fx.Node
    new: fx.Node
    boundary: Mapping[str, fx.Node]
    runs: Sequence[Run]
    note: str | None = None

    def key(self, weights: Mapping[str, torch.Tensor | None]) -> Hashable:
        """Equal for comparisons of the same computations on other tensors.

        It is made of what the comparison reads, not of what a plan says of it: nothing can be left out. Layers name
        their sizes differently (each cache has symbols of its own); a symbol counts by the place where it appears, and
        by its number in each run.
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
        """Draws values and compares, at the sizes of each run until one shows a difference."""
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
        rounds = val(old).dtype != torch.float64  # else the model runs in the precision of the truth: no error is seen
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
            # Looked at once before the end, not after every draw: whoever looks often enough finds a lucky moment.
            if trial + 1 == TRIALS and (not rounds or _judged(ours, theirs, old).problem is None):
                break
        return _judged(ours, theirs, old) if rounds else Check(None)


class Checks:
    """Comparisons, each kind of which is made once; its result is given to all that are the same computation."""

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
    """What is wrong with the errors of the rewritten rows, if anything, and the ratio of the median errors.

    Errors are heavy-tailed (a softmax near a tie is as good as a coin toss), so quantiles are compared, not means.
    """
    for quantile in (0.5, 0.9):
        a, b = float(ours.quantile(quantile)), float(theirs.quantile(quantile))
        if a > ALLOWED * b + 2 * eps:
            return f"has an error of {a:.1e} where the original has {b:.1e}", a / b if b else math.inf
    median = float(theirs.median())
    return None, float(ours.median()) / median if median > 0 else None


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative RMS difference over the entries where the truth ``b`` is finite; inf where only one of them is."""
    finite = torch.isfinite(b)
    if not torch.isfinite(a)[finite].all():
        return math.inf
    norm = b[finite].square().mean().sqrt() if finite.any() else b.new_zeros(())
    error = (a[finite] - b[finite]).square().mean().sqrt() if finite.any() else norm
    return float(error / norm) if norm > 0 else float(error)


def _row_errors(result: torch.Tensor, truth: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Relative error of every row of features that is finite in ``where`` and in the truth."""
    finite = (torch.isfinite(where) & torch.isfinite(truth)).all(-1)
    truth, result = truth[finite], result[finite].double()
    norm = truth.norm(dim=-1)
    errors: torch.Tensor = (result - truth).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float64).tiny)
    return errors[norm > 0]
