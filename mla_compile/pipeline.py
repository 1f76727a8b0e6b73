"""The passes, in order, over one captured program.

latent_cache       before everything: K and V that the caller keeps become rows, and are no expanded cache any more;
normalize,
write_flex,
canonicalize,
split_products,
write_softmax      first, so that every later pass sees one spelling;
find_attention,
unfollowed,
linear_map, judge  read only: they decide everything before anything is changed;
share_rows         before judge: what is the same for all heads is copied to them last; what still reads such copies
                   after verify gets the model's own back;
slice_rows         before judge: slices of rows beside the slices of K and V that they make; nothing reads them yet;
split_heads        an attention that was refused, where groups of its heads can be judged by themselves; then all are
                   found and judged again, and the split is taken back where that absorbs no more of it;
restore_flex       before any rewrite: what is not absorbed keeps its kernel;
absorb             rewrites the sites that were judged legal and worth it;
verify             checks each distinct rewrite against float64 while the original is still at hand;
fold               after verify, whose inputs are the unfolded queries;
narrow             after verify, whose inputs are what it replaces;
lower              last, because absorb speaks in terms of the operator.

The program that comes in is never changed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import sympy
import torch
from torch import fx

from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.core.drawing import SiteDrawing
from mla_compile.core.program import Program, copy_graph
from mla_compile.core.records import PassRecord
from mla_compile.errors import VerificationError
from mla_compile.options import Options
from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.attention.unfollowed import unfollowed
from mla_compile.passes.cache.caching import with_latent_cache
from mla_compile.passes.canonical.flex import restore_flex, write_flex
from mla_compile.passes.canonical.normalize import normalize
from mla_compile.passes.canonical.products import split_products
from mla_compile.passes.canonical.softmax import write_softmax
from mla_compile.passes.canonical.views import canonicalize
from mla_compile.passes.decide.cost import AbsorbedColumns, default_device
from mla_compile.passes.decide.judge import judge
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.decide.share_rows import Copied, restore_copies, share_rows
from mla_compile.passes.decide.slice_rows import slice_rows
from mla_compile.passes.ir.walk import remove_dead_code, weight_nodes
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import Unsplit, gains, groups_of, reports_of, shown, unsplit
from mla_compile.passes.report.site import unfollowed_report
from mla_compile.passes.rewrite.absorb import absorb
from mla_compile.passes.rewrite.fold import fold
from mla_compile.passes.rewrite.lower import lower_to_aten
from mla_compile.passes.rewrite.narrow import narrow
from mla_compile.passes.rewrite.project import lower_projections
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.rewrite.split_heads import SplitSite, split_heads
from mla_compile.passes.verify.check import Check, check_site, key_of
from mla_compile.passes.verify.split import check_split
from mla_compile.report.report import Report

R = TypeVar("R")


@dataclass(frozen=True)
class SiteCost:
    """The sizes that decide between the forms in one call; symbols are those of the graph's shapes.

    ``parts``: what is absorbed, where that is not the whole attention.
    """

    dims: Dims
    B: int | sympy.Expr
    S: int | sympy.Expr
    T: int | sympy.Expr
    parts: tuple[AbsorbedColumns, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        program: the rewritten copy.
        report: what became of every attention.
        absorbed: how many sites were rewritten.
        variants: sites whose form is picked in every call; then ``base`` is kept beside the rewritten program.
        base: what the sites were absorbed in: the captured program, or what its cache of rows made of it.
    """

    program: Program
    report: Report
    absorbed: int
    variants: tuple[SiteCost, ...]
    base: Program


class _Clock:
    """Times passes and checks the graph after each of them."""

    def __init__(self, program: Program, records: list[PassRecord]) -> None:
        self.program = program
        self.records = records

    def run(self, name: str, work: Callable[[], R], changes: Callable[[R], int]) -> R:
        start = time.perf_counter()
        result = work()
        if changes(result):
            self.program.gm.graph.lint()
        self.records.append(PassRecord(name, changes(result), time.perf_counter() - start))
        return result


def run(
    program: Program,
    options: Options,
    name: str = "",
    *,
    frozen: bool = False,
    own_cache: bool = False,
    draw: bool = False,
) -> Outcome:
    """Rewrites a copy of ``program`` as far as it can be proved right and pays.

    ``frozen``: its weights will not change any more, so that folding them costs nothing in a call. ``own_cache``: with
    ``cache="latent"``, inputs that hold K and V are taken to come from the program itself. ``draw``: the report keeps
    each attention as a drawing.

    With ``options.verify`` every distinct rewritten site is compared with the original in float64; a site that fails is
    left as it was (``options.strict``: raises :class:`VerificationError`).
    """
    failed: dict[str, str] = {}
    start = time.perf_counter()
    base = program if options.cache != "latent" else with_latent_cache(program, own_cache)
    kept = PassRecord("latent_cache", len(base.cache.recipes) if base.cache else 0, time.perf_counter() - start)
    while True:
        outcome, checks = _run_once(base, options, name, failed, frozen, kept, draw)
        new = {node: check.problem for node, check in checks.items() if check.problem is not None}
        if not new:
            return outcome
        if options.strict:
            raise VerificationError(f"a rewritten attention {next(iter(new.values()))}; it was not used")
        failed.update(new)


def _run_once(
    base: Program,
    options: Options,
    name: str,
    failed: Mapping[str, str],
    frozen: bool,
    kept: PassRecord,
    draw: bool,
    whole: Mapping[str, Unsplit] | None = None,
) -> tuple[Outcome, dict[str, Check]]:
    """``whole``: attentions that are not to be split by heads, and what is to be said of that."""
    program = base.copy()
    graph = program.gm.graph
    clock = _Clock(program, [kept])
    whole = dict(whole or {})
    clock.run("normalize", lambda: normalize(graph), int)
    flex = clock.run("write_flex", lambda: write_flex(program.gm, program.fake_mode), len)
    clock.run("canonicalize", lambda: canonicalize(graph), int)
    weights = weight_nodes(graph, program.weights)
    clock.run("split_products", lambda: split_products(graph, weights, program.fake_mode), int)
    clock.run("write_softmax", lambda: write_softmax(graph, weights, program.fake_mode), int)
    device = default_device(_device_type(program.gm))
    # A fold of weights that can change is compared with copies of them in every call, which reads more bytes than any
    # fold saves: with that cost counted, "auto" comes out as "never" for all dims.
    folding = "never" if options.fold == "auto" and not frozen else options.fold

    copied: list[Copied] = []

    def judged() -> tuple[list[Verdict], Maps]:
        sites = clock.run("find_attention", lambda: find_attention(graph, weights), lambda _: 0)
        found = clock.run("share_rows", lambda: share_rows(sites, weights, program.fake_mode), len)
        if found:
            copied.extend(found)
            sites = find_attention(graph, weights)
        plain = LinearMaps(weights, program.fake_mode)
        maps = clock.run("slice_rows", lambda: slice_rows(sites, plain), lambda maps: len(maps.shown))
        told = clock.run("judge", lambda: judge(graph, sites, maps, device, options.forms, folding), lambda _: 0)
        return told, maps

    verdicts, maps = judged()
    verdicts = [whole.get(v.site.node.name, Unsplit()).told(v) for v in verdicts]
    groups = [
        found
        for v in verdicts
        if not {v.site.node.name} & {*whole, *failed} and (found := groups_of(v, maps)) is not None
    ]
    together = {g.site.node: next(v for v in verdicts if v.site is g.site) for g in groups}
    before = copy.deepcopy(graph) if options.verify and groups else None
    splits = clock.run("split_heads", lambda: split_heads(groups, program.fake_mode), len) if groups else []
    if splits:
        remove_dead_code(graph)
        weights = weight_nodes(graph, program.weights)
        verdicts, _ = judged()
        by_node = {v.site.node: v for v in verdicts}
        useless = {s.name: unsplit(s, by_node) for s in splits if not gains(s, together[s.site.node], by_node)}
        if useless:
            return _run_once(base, options, name, failed, frozen, kept, draw, {**whole, **useless})
    lost = clock.run("unfollowed", lambda: unfollowed(graph, weights, [v.site for v in verdicts]), lambda _: 0)
    verdicts = [
        replace(v, code=Code.VERIFY_FAILED, reason=failed[v.site.node.name]) if v.site.node.name in failed else v
        for v in verdicts
    ]
    chosen = [v for v in verdicts if v.absorb]
    absorbing = {v.site.node for v in chosen}
    sketch = Sketch(copy_graph(graph), {n.name for n in weights}) if draw else None
    clock.run("restore_flex", lambda: restore_flex(graph, flex, absorbing), int)
    if options.verify and chosen and before is None:
        before = copy.deepcopy(graph)
    rewritten = clock.run("absorb", lambda: _absorb_all(program, chosen), len)
    checks: dict[str, Check] = {}
    if before is not None:
        checks = clock.run("verify", lambda: _verify(rewritten, splits, verdicts, before, program), lambda _: 0)
    restore_copies(copied)  # not before: the check computes an attention as it was from the rows that it reads now
    now = LinearMaps(weight_nodes(graph, program.weights), program.fake_mode)
    folded = clock.run("fold", lambda: fold(program, now, rewritten, chosen), lambda done: sum(map(len, done.values())))
    reports = reports_of(verdicts, splits, checks, folded)
    reports += [unfollowed_report(i, *found) for i, found in enumerate(lost, start=len(reports))]
    if sketch is not None:
        pictures = _drawn(sketch, shown(verdicts, splits), rewritten) + [sketch.unfollowed(*found) for found in lost]
        reports = [replace(report, drawing=drawn) for report, drawn in zip(reports, pictures, strict=True)]
    alone = [pair for v in chosen for pair in v.narrowed]
    clock.run("narrow", lambda: narrow(alone, LinearMaps(weights, program.fake_mode)), int)
    if options.lowering == "aten":
        clock.run("lower", lambda: lower_to_aten(graph, program.fake_mode), int)
    clock.run("lower_projections", lambda: lower_projections(graph, program.fake_mode), int)
    remove_dead_code(graph)
    program.gm.recompile()
    variants = tuple(_site_cost(v) for v in chosen if v.by_call)
    report = Report(tuple(reports), graph=name, passes=tuple(clock.records))
    return Outcome(program, report, sum(r.verdict == "absorbed" for r in reports), variants, base), checks


def _drawn(sketch: Sketch, verdicts: list[Verdict], rewritten: list[Absorbed]) -> list[SiteDrawing]:
    now = {absorbed.plan.site.node.name: absorbed.out for absorbed in rewritten}
    names = [verdict.site.node.name for verdict in verdicts]
    return [sketch.rewritten(v, now[n]) if n in now else sketch.left(v) for v, n in zip(verdicts, names, strict=True)]


def _verify(
    rewritten: list[Absorbed],
    splits: Sequence[SplitSite],
    verdicts: Sequence[Verdict],
    before: fx.Graph,
    program: Program,
) -> dict[str, Check]:
    """One check per distinct site, its result given to all sites that are the same computation.

    An attention that was split by heads is compared as a whole with what it was.
    """
    done: dict[tuple[object, ...], Check] = {}
    checks: dict[str, Check] = {}
    grouped = {g.node for s in splits for g in s.groups}
    for site in rewritten:
        if site.plan.site.node in grouped:
            continue
        key = key_of(site.plan)
        if key not in done:
            done[key] = check_site(site.plan, site.out, before, program.weights)
        checks[site.plan.site.node.name] = done[key]
    by_node = {v.site.node: v for v in verdicts}
    for split in splits:
        groups = [by_node[g.node] for g in split.groups]
        checks[split.name] = check_split(split, groups, before, program.weights)
    return checks


def _absorb_all(program: Program, verdicts: list[Verdict]) -> list[Absorbed]:
    rewritten = [absorb(v.plan, program.fake_mode) for v in verdicts if v.plan is not None]
    remove_dead_code(program.gm.graph)
    return rewritten


def _site_cost(verdict: Verdict) -> SiteCost:
    assert verdict.plan is not None
    return SiteCost(verdict.plan.dims, *verdict.plan.sizes(), verdict.parts)


def _device_type(gm: fx.GraphModule) -> str:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
