"""The outcome of the passes over one program, with the report on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mla_compile.core.drawing import SiteDrawing
from mla_compile.core.program import Program
from mla_compile.core.records import SiteReport
from mla_compile.passes.cache.packed import error_of
from mla_compile.passes.cost.cost import SiteCost
from mla_compile.passes.ir.collectives import collectives, received_bytes
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import attentions, reports_of, shown
from mla_compile.passes.report.site import unfollowed_report
from mla_compile.passes.sources.records import Verdict
from mla_compile.pipeline.manager import PassError
from mla_compile.pipeline.state import PassState
from mla_compile.report.report import Report


@dataclass(frozen=True)
class Outcome:
    """The result of running the passes over a program.

    Attributes:
        program: the rewritten copy.
        report: the verdict on every attention.
        absorbed: the number of rewritten sites.
        variants: the costs of sites that only some calls absorb. These calls run ``program``, and other calls run
            ``long``.
        base: the program before absorption: the captured program, or the program whose cache holds rows.
        sites: for each entry of the report, the name that :func:`mla_compile.pipeline.run` takes in ``refused``.
        by_heads: the number of attentions of ``program`` that are computed for a few heads at a time.
        faster: the number of other operators that were replaced by faster ones with equal results.
        expanded: a copy of ``base`` that computes large expanded attentions for a few heads at a time, and in which
            other operators were replaced by faster ones; None if ``base`` is not changed.
        warnings: messages about code that is correct but slower than requested. They are not verdicts.
        fused: the number of hand-absorbed attentions (absorbed in the model's code) that one operator now replaces.
    """

    program: Program
    report: Report
    absorbed: int
    variants: tuple[SiteCost, ...]
    base: Program
    sites: tuple[str, ...] = ()
    by_heads: int = 0
    faster: int = 0
    expanded: Program | None = None
    warnings: tuple[str, ...] = ()
    fused: int = 0

    @property
    def long(self) -> Program:
        """The program for calls in which absorption does not pay: ``expanded`` if it exists, else ``base``."""
        return self.base if self.expanded is None else self.expanded


_SHARED = "each of {ranks} ranks keeps its share of the rows of {count} cached tensors"
_SENT = "; {count:,} of the bytes that a call receives are {what} of other ranks"
_RECEIVED = "a call of the traced sizes receives {count:,} bytes from other ranks ({each})"
_APPENDED = "new rows are appended in place to {count} cached tensor{s}, whose rows are not copied in every call"


def outcome_of(state: PassState, name: str) -> Outcome:
    """Return the outcome for a program; ``name`` is the name of its graph."""
    program = state.program
    program.gm.recompile()
    reports = reports_of(state.verdicts, state.splits, state.checks, state.folded)
    reports += [unfollowed_report(i, *found) for i, found in enumerate(state.lost, start=len(reports))]
    sites = (*attentions(state.verdicts, state.splits), *(node.name for node, _ in state.lost))
    reports = [_noted(r, site, state) for r, site in zip(reports, sites, strict=True)]
    if state.sketch is not None:
        reports = [replace(r, drawing=drawn) for r, drawn in zip(reports, _drawings(state, state.sketch), strict=True)]
    messages = (*state.messages, *_rows_told(program), *state.warnings)
    if reports and state.options.cache_dtype == "fp8":
        messages += _packed_told(state.base)
    done = Outcome(
        program,
        Report(tuple(reports), graph=name, passes=tuple(state.records), messages=messages),
        absorbed=sum(r.verdict == "absorbed" for r in reports),
        variants=tuple(_site_cost(v) for v in state.chosen if v.by_call),
        base=_settled(state.base) if state.base.cache is not None else state.captured,
        sites=sites,
        by_heads=state.by_heads,
        faster=state.faster,
        expanded=state.expanded,
        warnings=state.warnings,
        fused=len(state.fused),
    )
    _check_collectives(state.captured, done)
    return done


def _settled(program: Program) -> Program:
    """Restore library operators that are still needed, and return the program."""
    settle(program.gm.graph)
    remove_dead_code(program.gm.graph)
    program.gm.recompile()
    return program


def _check_collectives(program: Program, done: Outcome) -> None:
    """Check that the collectives are unchanged.

    Another rank may run another form of the graph, and would wait forever for a missing collective.
    """
    before = collectives(program.gm.graph)
    for after in (done.program, done.base, done.long):
        if collectives(after.gm.graph) != before:
            raise PassError(f"the passes changed the {len(before)} collectives of the graph: ranks would hang")


def _noted(report: SiteReport, name: str, state: PassState) -> SiteReport:
    """Add the note and the cache sizes that were recorded for ``name`` to a report."""
    note, kept = state.head_notes.get(name), state.held.get(name)
    notes = report.notes if note is None else (*report.notes, note)
    if kept is None:
        return replace(report, notes=notes)
    return replace(report, notes=notes, values_held_before=kept.before, values_held_after=kept.after)


def _drawings(state: PassState, sketch: Sketch) -> list[SiteDrawing]:
    now = {done.plan.site.node.name: done for done in state.rewritten}
    drawn: list[SiteDrawing] = []
    for verdict in shown(state.verdicts, state.splits):
        done = now.get(verdict.site.node.name)
        drawn.append(sketch.left(verdict) if done is None else sketch.rewritten(verdict, done))
    return drawn + [sketch.unfollowed(*found) for found in state.lost]


def _site_cost(verdict: Verdict) -> SiteCost:
    assert verdict.plan is not None
    chosen = verdict.plan.visible.chosen
    return SiteCost(verdict.plan.dims, *verdict.plan.sizes(), verdict.parts, chosen and chosen.size)


def _rows_told(program: Program) -> Iterator[str]:
    """Yield messages about rows that are appended in place, and about rows that ranks send or share."""
    appended = sum(one.input is not None and not one.shared for one in program.appends)
    if appended:
        yield _APPENDED.format(count=appended, s="s" * (appended != 1))
    received = received_bytes(program.gm.graph)
    if received:
        each = ", ".join(f"{name} {count:,}" for name, count in received.items())
        yield _RECEIVED.format(count=sum(received.values()), each=each)
    shared = sum(one.shared for one in program.appends)
    if shared and program.capture.sharing is not None:
        what = "queries and results" if program.capture.sharing.heads else "results"
        ours = sum(received_bytes(program.gm.graph, ours=True).values())
        sent = _SENT.format(count=ours, what=what) if ours else ""
        yield _SHARED.format(ranks=program.capture.sharing.size, count=shared) + sent


def _packed_told(program: Program) -> tuple[str, ...]:
    """Return notes about the effect of ``cache_dtype="fp8"`` on cached rows, with the measured error."""
    recipes = [recipe for recipe, _ in program.cache.recipes.values()] if program.cache else []
    widths = {recipe.widths[k] for recipe in recipes for k in range(len(recipe.widths)) if recipe.is_packed(k)}
    if not widths:
        return ('cache_dtype="fp8" changes nothing here: no K and V are kept as rows',)
    error = max(map(error_of, widths))
    return (f"rows of the cache are kept in float8 with one scale per row: measured relative error {error:.1%}",)
