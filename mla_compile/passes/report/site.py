"""Turn a verdict into the record that users read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from mla_compile.codes import CODES, Code
from mla_compile.core.records import SiteReport
from mla_compile.passes.cost import cost
from mla_compile.passes.cost.formulas import Form
from mla_compile.passes.decide.call_sizes import chosen_keys
from mla_compile.passes.decide.choosing import choosing
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.graph import TOLD, operator_name, val
from mla_compile.passes.ir.locate import locate
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.stand_in import DROPPED
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.rewrite.records import Folded
from mla_compile.passes.sources.records import AbsorbPlan, Fusion, Verdict
from mla_compile.passes.verify.comparison import Check


def site_report(
    index: int,
    verdict: Verdict,
    check: Check | None = None,
    folded: Sequence[Folded] | None = None,
    counted: set[fx.Node] | None = None,
) -> SiteReport:
    """Report what happened to one attention, with figures if its sizes are known.

    ``counted``: the indexer scores whose cost earlier reports include. This report's scores are added to the set.
    """
    done = "products rewritten one by one" if verdict.absorb else "no operator takes its place"
    notes = [f"{done}: {verdict.site.open_core}"] if verdict.site.open_core else []
    notes += [verdict.site.node.meta[TOLD]] if TOLD in verdict.site.node.meta else []
    notes += verdict.notes
    notes += [] if verdict.plan is None else _masks(verdict.plan)
    notes += _roundings(verdict)
    notes += [check.note] if check is not None and check.note else []
    report = SiteReport(
        index=index,
        where=locate(verdict.site.operator),
        verdict="absorbed" if verdict.absorb else CODES[verdict.code].verdict,
        code=verdict.code,
        reason=verdict.reason,
        fix=CODES[verdict.code].fix if verdict.fix is None else verdict.fix,
        blame=None if verdict.blame is None else locate(verdict.blame),
        precision_ratio=None if check is None else check.ratio,
        notes=tuple(notes),
    )
    if verdict.plan is None:
        return report if verdict.fusion is None else _of_lists(report, verdict.fusion)
    if verdict.parts:
        return _of_part(report, verdict, verdict.plan)
    dims = verdict.plan.dims
    element = val(verdict.plan.latent.node).element_size()
    after: cost.ChosenForm = "expanded" if not verdict.absorb else "folded" if folded else "chained"
    listed = chosen_keys(verdict.plan) if verdict.absorb else None
    before: Form = "held" if verdict.held else "expanded"
    # For a site that stays expanded, the report shows what the absorbed form would cost.
    compared: Form = "chained" if not verdict.absorb else after if listed is None else "sparse"
    chooses = choosing(verdict.plan) if verdict.absorb else None
    if chooses is not None and counted is not None:
        chooses = None if chooses.scores in counted else chooses
        counted |= set() if chooses is None else {chooses.scores}
    errors = [f.error for f in folded or () if f.error is not None]
    return replace(
        report,
        form=after,
        dims=dims,
        values_read_before=verdict.plan.expanded_values,
        values_read_after=verdict.plan.row_values,
        decode_flops_before=dims.G * cost.decode_flops(dims, before),
        decode_flops_after=dims.G * cost.decode_flops(dims, compared),
        decode_bytes_before=dims.G * cost.decode_bytes(dims, before, element),
        decode_bytes_after=dims.G * cost.decode_bytes(dims, compared, element),
        break_even_S=None if verdict.beside else cost.break_even_S(dims),
        fold_error=max(errors, default=None),
        chosen=listed,
        choosing_flops=None if chooses is None else chooses.flops,
        choosing_bytes=None if chooses is None else chooses.bytes,
        choosing_fused=None if chooses is None else chooses.fused,
    )


_FUSED = "its scores, softmax and weighted sum are one operator now, which reads each row once"
_SEVERAL = "its rows lie in {count} memories, which are not joined any more: one operator reads each, once"


def fused_told(fusion: Fusion) -> list[str]:
    """Return the notes on an attention over shared rows that the attention operator replaced."""
    several = _SEVERAL.format(count=len(fusion.memories))
    return [*(note for plan in fusion.each for note in _masks(plan)), several if fusion.memories else _FUSED]


def _masks(plan: AbsorbPlan) -> list[str]:
    """Return a note that says which arguments of the operator replace masks, and what stays a mask."""
    seen = plan.visible
    if not plan.whole or not plan.site.masks:
        return []
    names = {node.name for node in seen.counts}
    of = f" ({', '.join(sorted(names))})" if names else ""
    told = ["a diagonal"] * seen.causal + [f"a length{of}"] * bool(seen.lengths)
    told += [f"a window of {seen.window} keys"] * bool(seen.window)
    told += ["a list of keys"] * (seen.chosen is not None)
    told += ["queries that see no key weigh all keys alike"] * seen.alike
    rows = {*plan.heads, *plan.site.queries}
    of_keys = all(m.kind != "add" and not rows & set(flatten(m.operand.axes)) for m in seen.masks)
    left = [f"left as a mask{' of keys' * of_keys}: {why}" for why in seen.left]
    return [f"mask: {'; '.join([*told, *left]) or 'hides nothing'}"]


def _roundings(verdict: Verdict) -> list[str]:
    """Return a note on the roundings that the absorbed form omits."""
    if not verdict.absorb or verdict.plan is None:
        return []
    visited = (visit.node for term in verdict.plan.terms for visit in term.piece.path)
    dropped = dict.fromkeys(node.meta[DROPPED] for node in visited if DROPPED in node.meta)
    return [f"rows are no longer rounded to {', '.join(dropped)} before the up-projection"] if dropped else []


def _of_lists(report: SiteReport, fusion: Fusion) -> SiteReport:
    """If an attention over shared rows has an index list, add the cost of choosing keys to the report."""
    for plan in fusion.each:
        if (listed := chosen_keys(plan)) is not None:
            chooses = choosing(plan)
            report = replace(
                report,
                chosen=listed,
                choosing_flops=None if chooses is None else chooses.flops,
                choosing_bytes=None if chooses is None else chooses.bytes,
                choosing_fused=None if chooses is None else chooses.fused,
            )
    return report


def _of_part(report: SiteReport, verdict: Verdict, plan: AbsorbPlan) -> SiteReport:
    """Complete the report on a site that is absorbed in part.

    Only a site with rows for both sides gets figures, because the cache of a side that stays is unknown.
    """
    report = replace(
        report,
        form="chained",
        dims=plan.dims,
        parts=tuple(dict.fromkeys(p.side for p in verdict.parts)),
        kept=verdict.kept,
        break_even_S=cost.part_break_even(verdict.parts),
    )
    if not (plan.keys and plan.vals):
        return report
    return replace(report, values_read_before=plan.expanded_values, values_read_after=plan.row_values)


def unfollowed_report(index: int, node: fx.Node, stop: Stop) -> SiteReport:
    """Report an attention of which only ``node`` is known: a softmax, or an operator that computes everything."""
    code = Code(stop.code)
    fix = CODES[code].fix
    if code is Code.UNSUPPORTED_OP:
        written = "softmax" in operator_name(node)
        fix = "write the scores with mul, add, masked_fill, where, softmax, view and transpose"
        if is_contraction(stop.node):  # the product may mix heads, so rewriting the scores would not help
            fix = f"absorb by hand: {(CODES[Code.NOT_SOFTMAX].fix or '').partition(': ')[2]}"
        fix = fix if written else "call F.scaled_dot_product_attention, or write the attention out"
    return SiteReport(
        index=index,
        where=locate(node),
        verdict=CODES[code].verdict,
        code=code,
        reason=stop.detail,
        fix=fix if stop.fix is None else stop.fix,
        blame=locate(stop.node),
    )
