"""The state that passes share about one program, and the final outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from mla_compile.analysis import CANONICAL, Analysis, CanonicalProgram, analyse, copy_with_origins
from mla_compile.caching import packed_notes
from mla_compile.codes import Code
from mla_compile.core.choices import Fold
from mla_compile.core.dims import Dims
from mla_compile.core.drawing import SiteDrawing
from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord, SiteReport
from mla_compile.options import Options
from mla_compile.passes.cache.held import HeldValues, held
from mla_compile.passes.decide.cost import AbsorbedColumns
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.collectives import received_bytes
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import attentions, reports_of, shown
from mla_compile.passes.report.site import unfollowed_report
from mla_compile.passes.rewrite.records import Absorbed, Folded
from mla_compile.passes.rewrite.split_heads import SplitSite
from mla_compile.passes.verify.comparison import Check
from mla_compile.report.report import Report


@dataclass(frozen=True)
class SiteCost:
    """The sizes that decide between the forms in one call; symbols are those of the graph's shapes.

    ``parts``: the absorbed part, if it is not the whole attention. ``chosen``: the number of keys chosen for each
    query.
    """

    dims: Dims
    B: int | sympy.Expr
    S: int | sympy.Expr
    T: int | sympy.Expr
    parts: tuple[AbsorbedColumns, ...] = ()
    chosen: int | sympy.Expr | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of running the passes over a program.

    Attributes:
        program: the rewritten copy.
        report: the verdict on every attention.
        absorbed: the number of rewritten sites.
        variants: the sites whose form is chosen in every call; ``base`` is then kept beside the rewritten program.
        base: the program in which sites were absorbed: the captured one, or the one whose cache holds rows.
        sites: for each entry of the report the name that :func:`mla_compile.pipeline.run` takes in ``refused``.
        by_heads: the number of attentions of ``program`` that are computed for a few heads at a time.
        expanded: ``base`` with its large attentions computed for a few heads at a time, if it has any.
        warnings: what is right but slower than was asked for, besides what the report says of attentions.
        fused: the number of attentions absorbed by hand that one operator now replaces.
    """

    program: Program
    report: Report
    absorbed: int
    variants: tuple[SiteCost, ...]
    base: Program
    sites: tuple[str, ...] = ()
    by_heads: int = 0
    expanded: Program | None = None
    warnings: tuple[str, ...] = ()
    fused: int = 0

    @property
    def long(self) -> Program:
        """The program for calls in which absorbing does not pay: ``base``, perhaps with its heads in groups."""
        return self.base if self.expanded is None else self.expanded


_SHARED = "each of {ranks} ranks keeps its share of the rows of {count} cached tensors"
_SENT = "; {count:,} of the bytes that a call receives are {what} of other ranks"
_RECEIVED = "a call of the traced sizes receives {count:,} bytes from other ranks ({each})"
_APPENDED = "new rows are appended in place to {count} cached tensor{s}, whose rows are not copied in every call"


class PassState:
    """One program on its way through the passes: the current graph, and the findings of the passes so far."""

    def __init__(
        self,
        base: Program,
        options: Options,
        failed: Mapping[str, tuple[Code, str]],
        read: CanonicalProgram | None = None,
        *,
        frozen: bool,
        draw: bool,
        recompiles: bool = False,
    ) -> None:
        self.base = base
        self.options = options
        self.failed = failed
        self.draw = draw
        self.recompiles = recompiles
        self.frozen = frozen
        # If weights can change, every call has to compare the folded weights with copies, which reads more bytes than
        # any fold saves. With that cost counted, "auto" comes out as "never" for all dims.
        self.folding: Fold = "never" if options.fold == "auto" and not frozen else options.fold
        self.program = copy_with_origins(base) if read is None else read.analysis.program
        self.untouched = copy_with_origins(base) if options.verify else None
        self.verdicts: list[Verdict] = []
        self.splits: list[SplitSite] = []
        self.lost: list[tuple[fx.Node, Stop]] = []
        self.sketch: Sketch | None = None
        self.rewritten: list[Absorbed] = []
        self.fused: list[Absorbed] = []
        self.held: dict[str, HeldValues] = {}
        self.checks: dict[str, Check] = {}
        self.folded: dict[str, list[Folded]] = {}
        self.records: list[PassRecord] = []
        self.messages: tuple[str, ...] = ()
        self.by_heads = 0
        self.expanded: Program | None = None
        self.head_notes: dict[str, str] = {}
        self.warnings: tuple[str, ...] = ()
        self.shared: set[fx.Node] = set()
        self._read = read
        self._analysis: Analysis | None = None

    def canonicalize(self, name: str) -> int:
        """Run a canonicalisation pass unless the program was read already; return its number of changes either way."""
        return CANONICAL[name](self.program) if self._read is None else self._read.changes[name]

    @property
    def graph(self) -> fx.Graph:
        """The current graph."""
        return self.program.gm.graph

    @property
    def analysis(self) -> Analysis:
        """The analysis of the program after canonicalisation, and after heads were split."""
        if self._analysis is None:
            self._analysis = analyse(self.program) if self._read is None else self._read.analysis.with_slices()
        return self._analysis

    @property
    def chosen(self) -> list[Verdict]:
        """The verdicts to absorb."""
        return [v for v in self.verdicts if v.absorb]

    def adopt(self, analysis: Analysis, verdicts: list[Verdict], splits: list[SplitSite]) -> None:
        """Continue with a copy that a pass has rewritten so that more of it is absorbed."""
        self.program, self._analysis, self.verdicts, self.splits = analysis.program, analysis, verdicts, splits

    def note_caches(self) -> None:
        """Record what the caches of attentions hold, while attentions still read the graph's inputs."""
        for name, group in attentions(self.verdicts, self.splits).items():
            plans = [v.plan for v in group if v.plan is not None and v.absorb and v.plan.keys and v.plan.vals]
            found = held(plans, self.base.cache) if len(plans) == len(group) else None
            if found is not None:
                self.held[name] = found

    def outcome(self, name: str, before: tuple[PassRecord, ...]) -> Outcome:
        """The outcome for the program; ``before``: the records of what preceded the passes."""
        self.program.gm.recompile()
        reports = reports_of(self.verdicts, self.splits, self.checks, self.folded)
        reports += [unfollowed_report(i, *found) for i, found in enumerate(self.lost, start=len(reports))]
        sites = (*attentions(self.verdicts, self.splits), *(node.name for node, _ in self.lost))
        reports = [self._noted(r, site) for r, site in zip(reports, sites, strict=True)]
        if self.sketch is not None:
            reports = [replace(r, drawing=drawn) for r, drawn in zip(reports, self._drawings(), strict=True)]
        variants = tuple(_site_cost(v) for v in self.chosen if v.by_call)
        appended = sum(one.input is not None and not one.shared for one in self.program.appends)
        messages = (*self.messages, *((_APPENDED.format(count=appended, s="s" * (appended != 1)),) if appended else ()))
        received = received_bytes(self.graph)
        if received:
            each = ", ".join(f"{name} {count:,}" for name, count in received.items())
            messages += (_RECEIVED.format(count=sum(received.values()), each=each),)
        shared = sum(one.shared for one in self.program.appends)
        if shared and self.program.sharing is not None:
            what = "queries and results" if self.program.sharing.heads else "results"
            ours = sum(received_bytes(self.graph, ours=True).values())
            sent = _SENT.format(count=ours, what=what) if ours else ""
            messages += (_SHARED.format(ranks=self.program.sharing.size, count=shared) + sent,)
        messages += self.warnings
        if reports and self.options.cache_dtype == "fp8":
            messages += packed_notes(self.base)
        report = Report(tuple(reports), graph=name, passes=(*before, *self.records), messages=messages)
        absorbed = sum(r.verdict == "absorbed" for r in reports)
        return Outcome(
            self.program, report, absorbed, variants, self.base, sites, self.by_heads, self.expanded, self.warnings,
            len(self.fused),
        )  # fmt: skip

    def _noted(self, report: SiteReport, name: str) -> SiteReport:
        """The report on an attention, with the notes and cache sizes recorded for ``name``."""
        note, kept = self.head_notes.get(name), self.held.get(name)
        notes = report.notes if note is None else (*report.notes, note)
        if kept is None:
            return replace(report, notes=notes)
        return replace(report, notes=notes, values_held_before=kept.before, values_held_after=kept.after)

    def _drawings(self) -> list[SiteDrawing]:
        assert self.sketch is not None
        now = {done.plan.site.node.name: done for done in self.rewritten}
        drawn: list[SiteDrawing] = []
        for verdict in shown(self.verdicts, self.splits):
            done = now.get(verdict.site.node.name)
            drawn.append(self.sketch.left(verdict) if done is None else self.sketch.rewritten(verdict, done))
        return drawn + [self.sketch.unfollowed(*found) for found in self.lost]


def _site_cost(verdict: Verdict) -> SiteCost:
    assert verdict.plan is not None
    chosen = verdict.plan.visible.chosen
    return SiteCost(verdict.plan.dims, *verdict.plan.sizes(), verdict.parts, chosen and chosen.size)
