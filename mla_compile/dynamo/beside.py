"""Choose buffers of K and V. A graph of ``torch.compile`` keeps rows in addition to these buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from mla_compile.capture.twins import with_twins
from mla_compile.core.program import Inputs, Program
from mla_compile.pipeline.outcome import Outcome
from mla_compile.runtime.beside import may_have_rows, rows_beside
from mla_compile.runtime.folds import FoldedWeights

RunPasses = Callable[[Program, Inputs], tuple[Outcome, FoldedWeights | None]]
"""Applies the passes to a captured program and its example inputs."""

_BESIDE = (
    "rows are kept beside {count} buffers of K and V, which torch.compile cannot replace: these are written as before; "
    "mla_compile.optimize(model) keeps rows in their place"
)


@dataclass(frozen=True)
class Rewritten:
    """A captured graph with its example inputs, the outcome of the passes, and its folded weights, if any.

    ``twins``: each input that was added for rows -> the buffer that the rows belong to. The added inputs come last.
    """

    captured: Program
    inputs: Inputs
    outcome: Outcome
    folds: FoldedWeights | None
    twins: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether a rewritten graph runs instead of the captured one."""
        done = self.outcome
        return bool(done.absorbed or done.by_heads or done.fused or done.faster) or done.base is not self.captured


def with_rows_beside(program: Program, example_inputs: Inputs, run: RunPasses) -> Rewritten | None:
    """Rewrite ``program`` with an added input, called a twin, for the rows of each chosen buffer.

    ``run`` applies the passes. They decide which twins become rows. The other twins are dropped. Returns None if no
    twin is left.
    """
    given = {node.name: value for node, value in zip(program.placeholders, example_inputs, strict=True)}
    written = {name: given[name] for name in program.mutations if isinstance(given.get(name), torch.Tensor)}
    chosen = list(may_have_rows(written))
    while chosen:
        made, twins = with_twins(program, chosen)
        if not twins:
            return None
        known = {twin: rows_beside(given[buffer]) for twin, buffer in twins.items()}
        rows = {twin: its for twin, its in known.items() if its is not None}
        made.know(latents={**program.capture.latents, **rows}, own=program.capture.own.union(twins))
        inputs = [*example_inputs, *(given[buffer] for buffer in twins.values())]
        outcome, folds = run(made, inputs)
        cache = outcome.base.cache
        kept = [] if cache is None else [twin for twin in twins if twin in cache.inputs]
        if len(kept) == len(twins):
            report = outcome.report
            if not outcome.absorbed:  # K and V are read from the buffers, and the rows are only written
                made.know(plain=True)
                outcome, folds = run(made, inputs)
            report = replace(report, messages=(*report.messages, _BESIDE.format(count=len(twins))))
            return Rewritten(made, inputs, replace(outcome, report=report), folds, twins)
        chosen = [twins[twin] for twin in kept]
    return None
