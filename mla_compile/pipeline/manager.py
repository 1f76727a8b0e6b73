"""The pass manager. It runs the passes of a table in order and keeps analyses between passes.

An analysis is computed when a pass first needs it. If a pass changes the graph, all analyses are dropped except those
in the pass's ``keeps``. A pass that tries something works on a copy with separate analyses. If the trial is better, the
state adopts the copy and its analyses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord
from mla_compile.errors import MlaCompileError
from mla_compile.passes.ir.graph import ORIGIN

_T = TypeVar("_T")


class PassError(MlaCompileError, RuntimeError):
    """A pass left an invalid graph: a bug of this library, found before the graph ran."""


class Analyses:
    """The analyses of one program. An analysis is a function that takes this object, or a frozen callable record."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._kept: dict[Callable[[Analyses], object], object] = {}

    def get(self, analysis: Callable[[Analyses], _T]) -> _T:
        """Return the result of ``analysis``. Compute it only if no valid result is kept."""
        if analysis not in self._kept:
            self._kept[analysis] = analysis(self)
        return cast("_T", self._kept[analysis])

    def invalidate(self, keeps: Collection[Callable[[Analyses], object]] = ()) -> None:
        """Drop all analyses except ``keeps``, because the graph has changed."""
        self._kept = {analysis: result for analysis, result in self._kept.items() if analysis in keeps}


class ManagedState(Protocol):
    """The state that the passes of a table read and write."""

    analyses: Analyses
    records: list[PassRecord]


@dataclass
class GraphState:
    """The state of passes over one graph. Subclasses add fields for the passes of a table.

    Attributes:
        analyses: the analyses of the current program.
        records: the changes and the time of each pass so far.
    """

    analyses: Analyses
    records: list[PassRecord] = field(default_factory=list, kw_only=True)

    @property
    def program(self) -> Program:
        """The current program."""
        return self.analyses.program


_S = TypeVar("_S", bound=ManagedState)


@dataclass(frozen=True)
class Pass(Generic[_S]):
    """One pass.

    Attributes:
        name: the name in reports.
        reads: what the pass reads, in words.
        changes: what the pass changes, in words; empty for an analysis.
        work: runs the pass, and returns the number of changes or findings.
        keeps: the analyses that are still valid after the pass has changed the graph.
        once: whether the pass only prepares the program. It is not repeated when other passes run again.
    """

    name: str
    reads: str
    changes: str
    work: Callable[[_S], int] = field(repr=False)
    keeps: tuple[Callable[[Analyses], Any], ...] = ()
    once: bool = False


def run_passes(passes: Iterable[Pass[_S]], state: _S) -> None:
    """Run ``passes`` in order, record the time of each, and check the graph after each pass that changed it."""
    for one in passes:
        start, before = time.perf_counter(), state.analyses
        found = one.work(state)
        if found and one.changes:
            _check(one, state.analyses.program)
            if state.analyses is before:  # otherwise the pass adopted a trial with valid analyses
                state.analyses.invalidate(one.keeps)
        state.records.append(PassRecord(one.name, found if one.changes else 0, time.perf_counter() - start))


def _check(one: Pass[Any], program: Program) -> None:
    """Lint the graph, and require metadata on new nodes. Captured nodes may lack metadata."""
    try:
        program.gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the pass {one.name} left an invalid graph: {error}") from error
    new = (n for n in program.gm.graph.nodes if n.op == "call_function" and ORIGIN not in n.meta)
    bare = [n.name for n in new if "val" not in n.meta]
    if bare:
        raise PassError(f"the pass {one.name} left nodes without metadata: {', '.join(bare)}")
