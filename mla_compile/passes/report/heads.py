"""One report for all groups of an attention that was split by heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.core.dims import Dims
from mla_compile.core.records import KeptPart, SiteReport
from mla_compile.passes.decide.head_groups import SplitSite, heads_of
from mla_compile.passes.ir.locate import locate
from mla_compile.passes.report.site import site_report
from mla_compile.passes.rewrite.records import Folded
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.verify.comparison import Check

Folds = Mapping[str, Sequence[Folded]]


def reports_of(
    verdicts: Sequence[Verdict], splits: Sequence[SplitSite], checks: Mapping[str, Check], folded: Folds
) -> list[SiteReport]:
    """Return one report per attention of the model, in the order of their outputs."""
    by_node = {v.site.node: v for v in verdicts}
    split_of = {g.node: s for s in splits for g in s.groups}
    reports: list[SiteReport] = []
    told: set[str] = set()
    counted: set[fx.Node] = set()
    for verdict in verdicts:
        name, split = verdict.site.node.name, split_of.get(verdict.site.node)
        if split is None:
            reports.append(site_report(len(reports), verdict, checks.get(name), folded.get(name), counted))
        elif split.name not in told:
            told.add(split.name)
            reports.append(split_report(len(reports), split, by_node, checks.get(split.name), folded, counted))
    return reports


def attentions(verdicts: Sequence[Verdict], splits: Sequence[SplitSite]) -> dict[str, list[Verdict]]:
    """Map the name of each unsplit attention to the verdicts for its report in :func:`reports_of`."""
    split_of = {g.node: s for s in splits for g in s.groups}
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        split = split_of.get(verdict.site.node)
        found.setdefault(verdict.site.node.name if split is None else split.name, []).append(verdict)
    return found


def shown(verdicts: Sequence[Verdict], splits: Sequence[SplitSite]) -> list[Verdict]:
    """Return one verdict per report of :func:`reports_of`.

    For a split attention, this is the verdict of the first absorbed group.
    """
    groups = attentions(verdicts, splits).values()
    return [next((v for v in group if v.absorb), group[0]) for group in groups]


def split_report(
    index: int,
    split: SplitSite,
    verdicts: Mapping[fx.Node, Verdict],
    check: Check | None,
    folded: Folds,
    counted: set[fx.Node],
) -> SiteReport:
    """Report which heads are absorbed, which stay, and why."""
    groups = [(heads_of(split, g), verdicts[g.node]) for g in split.groups]
    done = {w: site_report(index, v, check, folded.get(v.site.node.name), counted) for w, v in groups if v.absorb}
    parts: list[str] = []
    kept: list[KeptPart] = []
    for which, verdict in groups:
        if not verdict.absorb:
            blame = None if verdict.blame is None else locate(verdict.blame)
            kept.append(KeptPart(which, verdict.code, verdict.reason, blame))
            continue
        report = done[which]
        parts += [f"{side} of {which}" for side in report.parts] or [which]
        kept += [replace(k, part=f"{k.part} of {which}") for k in report.kept]
    reports = list(done.values())

    def total(figure: Callable[[SiteReport], int | None]) -> int | None:
        known = [n for r in reports if (n := figure(r)) is not None]
        return sum(known) if len(known) == len(groups) else None

    return replace(
        reports[0],
        where=locate(split.site.operator),
        reason="; ".join(dict.fromkeys(r.reason for r in reports)),
        form=_same([r.form for r in reports]),
        dims=_dims([r.dims for r in reports]),
        values_read_before=total(lambda r: r.values_read_before),
        values_read_after=_rows(verdicts, split) if total(lambda r: r.values_read_after) else None,
        decode_flops_before=total(lambda r: r.decode_flops_before),
        decode_flops_after=total(lambda r: r.decode_flops_after),
        decode_bytes_before=total(lambda r: r.decode_bytes_before),
        decode_bytes_after=total(lambda r: r.decode_bytes_after),
        break_even_S=min((r.break_even_S for r in reports if r.break_even_S is not None), default=None),
        fold_error=max((r.fold_error for r in reports if r.fold_error is not None), default=None),
        parts=tuple(parts),
        kept=tuple(kept),
        notes=tuple(dict.fromkeys(n for r in reports for n in r.notes)),
    )


def _rows(verdicts: Mapping[fx.Node, Verdict], split: SplitSite) -> int:
    """Return the values per token of all row tensors. A tensor that several groups share is counted once."""
    plans = [verdicts[g.node].plan for g in split.groups]
    rows = {r.node: r for plan in plans if plan is not None for r in plan.rows}
    return sum(r.size * r.count for r in rows.values())


def _same(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def _dims(found: Sequence[Dims | None]) -> Dims | None:
    """Return the sizes if all groups agree; H is the number of absorbed heads."""
    known = [d for d in found if d is not None]
    if len(known) != len(found) or len({replace(d, H=1) for d in known}) != 1:
        return None
    return replace(known[0], H=sum(d.H for d in known))
