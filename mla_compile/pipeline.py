"""The passes, in order, over one captured program: :data:`PASSES`.

Every pass is one object of one shape; each is timed, and its graph linted and its metadata checked, in the same way.
Three rules make the order:

* spelling first: what reads operators reads one spelling of each;
* then everything is decided before anything is changed. An analysis never edits: rows that no node holds are virtual
  sources, and what can only be told by trying (heads in groups) is tried on a copy, of which the better is kept;
* rewrites last, and only of what was decided. ``verify`` compares with the graph as it was captured, before rewrites
  that replace the inputs of its checks (folding, up-projections made narrower).

The program that comes in is never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import sympy
import torch
from torch import fx

from mla_compile.analysis import CANONICAL, Analysis, analyse, weights_of
from mla_compile.caching import packed_notes, with_latent_cache
from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.core.drawing import SiteDrawing
from mla_compile.core.program import Program, copy_graph
from mla_compile.core.records import PassRecord
from mla_compile.errors import MlaCompileError, VerificationError
from mla_compile.kernels import linear
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.passes.attention.indexer import indexers
from mla_compile.passes.attention.unfollowed import unfollowed
from mla_compile.passes.cache.append import append_in_place
from mla_compile.passes.decide.cost import AbsorbedColumns, Fold
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.collectives import collectives
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import Unsplit, gains, groups_of, names_of, reports_of, shown, unsplit
from mla_compile.passes.report.site import unfollowed_report
from mla_compile.passes.rewrite.absorb import absorb
from mla_compile.passes.rewrite.columns import read_parts
from mla_compile.passes.rewrite.dequantize import dequantize_once
from mla_compile.passes.rewrite.few_rows import few_rows
from mla_compile.passes.rewrite.fold import fold
from mla_compile.passes.rewrite.index import index_scores
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.lower import lower_to_aten
from mla_compile.passes.rewrite.narrow import narrow
from mla_compile.passes.rewrite.packed_rows import read_packed
from mla_compile.passes.rewrite.project import lower_projections
from mla_compile.passes.rewrite.records import Absorbed, Folded
from mla_compile.passes.rewrite.schedule import share_schedules
from mla_compile.passes.rewrite.split_heads import SplitSite, split_heads
from mla_compile.passes.verify.check import Check, check_site, key_of
from mla_compile.passes.verify.index import check_index, index_key
from mla_compile.passes.verify.split import check_split
from mla_compile.report.report import Report
from mla_compile.stand_ins import settled, with_stand_ins


@dataclass(frozen=True)
class SiteCost:
    """The sizes that decide between the forms in one call; symbols are those of the graph's shapes.

    ``parts``: what is absorbed, where that is not the whole attention. ``chosen``: how many keys a query has chosen.
    """

    dims: Dims
    B: int | sympy.Expr
    S: int | sympy.Expr
    T: int | sympy.Expr
    parts: tuple[AbsorbedColumns, ...] = ()
    chosen: int | sympy.Expr | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        program: the rewritten copy.
        report: what became of every attention.
        absorbed: how many sites were rewritten.
        variants: sites whose form is picked in every call; then ``base`` is kept beside the rewritten program.
        base: what the sites were absorbed in: the captured program, or what its cache of rows made of it.
        sites: for each entry of the report the name that :func:`run` takes in ``refused``.
    """

    program: Program
    report: Report
    absorbed: int
    variants: tuple[SiteCost, ...]
    base: Program
    sites: tuple[str, ...] = ()


_APPENDED = "new rows are written behind those of {count} cached tensors, which are no longer copied in every call"
_INDEX_STAYS = "an indexer stays as the model writes it: in one operator it {problem}"


class PassError(MlaCompileError, RuntimeError):
    """A pass left a graph that is not valid: a mistake of this library, found before anything was run."""


def run(
    program: Program,
    options: Options,
    name: str = "",
    *,
    frozen: bool = False,
    own_cache: bool = False,
    draw: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Rewrites a copy of ``program`` as far as it can be proved right and pays.

    ``frozen``: its weights will not change any more, so that folding them costs nothing in a call. ``own_cache``: with
    ``cache="latent"``, inputs that hold K and V are taken to come from the program itself. ``draw``: the report keeps
    each attention as a drawing. ``refused``: attentions that other ranks do not absorb, and why.

    With ``options.verify`` every distinct rewritten site is compared with the original in float64; a site that fails is
    left as it was (``options.strict``: raises :class:`VerificationError`).
    """
    start = time.perf_counter()
    plain = with_stand_ins(program, options)
    packs = options.cache_dtype == "fp8"
    base = with_latent_cache(plain, own_cache, packs=packs) if options.cache == "latent" else plain
    kept = PassRecord("latent_cache", len(base.cache.recipes) if base.cache else 0, time.perf_counter() - start)
    before = (PassRecord("capture", 0, program.seconds), kept)
    # A failed site may have been what kept another from being absorbed, or absorbed with it: everything is decided
    # again without it. This ends, because every round adds a site.
    failed = {name: (Code.RANKS_DIFFER, why) for name, why in refused.items()}
    while True:
        state = _State(base, options, frozen, failed, draw)
        for one in PASSES:
            state.apply(one)
        new = {node: check.problem for node, check in state.checks.items() if check.problem is not None}
        if not new:
            done = state.outcome(name, before)
            _check_collectives(program, done)
            if plain is program:
                return done
            return replace(done, base=program if base is plain else settled(base))
        if options.strict:
            raise VerificationError(f"a rewritten attention {next(iter(new.values()))}; it was not used")
        failed.update((name, (Code.VERIFY_FAILED, problem)) for name, problem in new.items())


class _State:
    """One program on its way through the passes: what they have found so far, and the graph as it is now."""

    def __init__(
        self, base: Program, options: Options, frozen: bool, failed: Mapping[str, tuple[Code, str]], draw: bool
    ) -> None:
        self.base = base
        self.options = options
        self.failed = failed
        self.draw = draw
        # A fold of weights that can change is compared with copies of them in every call, which reads more bytes than
        # any fold saves: with that cost counted, "auto" comes out as "never" for all dims.
        self.folding: Fold = "never" if options.fold == "auto" and not frozen else options.fold
        self.program = base.copy()
        for node in self.graph.nodes:
            # Names survive copies of a graph and nodes do not: the check looks up its inputs by name.
            node.meta[ORIGIN] = node.name
        self.untouched = self.program.copy() if options.verify else None
        self.verdicts: list[Verdict] = []
        self.splits: list[SplitSite] = []
        self.lost: list[tuple[fx.Node, Stop]] = []
        self.sketch: Sketch | None = None
        self.rewritten: list[Absorbed] = []
        self.checks: dict[str, Check] = {}
        self.folded: dict[str, list[Folded]] = {}
        self.records: list[PassRecord] = []
        self.messages: tuple[str, ...] = ()
        self._analysis: Analysis | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.program.gm.graph

    @property
    def analysis(self) -> Analysis:
        """The analysis of the program as it stands after the canonical passes, and after heads were split."""
        if self._analysis is None:
            self._analysis = analyse(self.program)
        return self._analysis

    @property
    def chosen(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.absorb]

    def adopt(self, analysis: Analysis, verdicts: list[Verdict], splits: list[SplitSite]) -> None:
        """Goes on with a copy that a pass has rewritten, because more of it is absorbed."""
        self.program, self._analysis, self.verdicts, self.splits = analysis.program, analysis, verdicts, splits

    def apply(self, one: Pass) -> None:
        """Runs a pass, records how long it took, and checks the graph it leaves where it changed one."""
        start = time.perf_counter()
        changes = one.work(self)
        if changes and one.changes:
            _check(one, self.program)
        self.records.append(PassRecord(one.name, changes if one.changes else 0, time.perf_counter() - start))

    def outcome(self, name: str, before: tuple[PassRecord, ...]) -> Outcome:
        self.program.gm.recompile()
        reports = reports_of(self.verdicts, self.splits, self.checks, self.folded)
        reports += [unfollowed_report(i, *found) for i, found in enumerate(self.lost, start=len(reports))]
        sites = (*names_of(self.verdicts, self.splits), *(node.name for node, _ in self.lost))
        if self.sketch is not None:
            reports = [replace(r, drawing=drawn) for r, drawn in zip(reports, self._drawings(), strict=True)]
        variants = tuple(_site_cost(v) for v in self.chosen if v.by_call)
        appended = sum(one.input is not None for one in self.program.appends)
        messages = (*self.messages, *((_APPENDED.format(count=appended),) if appended else ()))
        if reports and self.options.cache_dtype == "fp8":
            messages += packed_notes(self.base)
        report = Report(tuple(reports), graph=name, passes=(*before, *self.records), messages=messages)
        return Outcome(self.program, report, sum(r.verdict == "absorbed" for r in reports), variants, self.base, sites)

    def _drawings(self) -> list[SiteDrawing]:
        assert self.sketch is not None
        now = {done.plan.site.node.name: done for done in self.rewritten}
        drawn: list[SiteDrawing] = []
        for verdict in shown(self.verdicts, self.splits):
            done = now.get(verdict.site.node.name)
            drawn.append(self.sketch.left(verdict) if done is None else self.sketch.rewritten(verdict, done))
        return drawn + [self.sketch.unfollowed(*found) for found in self.lost]


def _check(one: Pass, program: Program) -> None:
    """Lints the graph and looks for new nodes without metadata; torch leaves some of its own without."""
    try:
        program.gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the pass {one.name} left an invalid graph: {error}") from error
    new = (n for n in program.gm.graph.nodes if n.op == "call_function" and ORIGIN not in n.meta)
    bare = [n.name for n in new if "val" not in n.meta]
    if bare:
        raise PassError(f"the pass {one.name} left nodes without metadata: {', '.join(bare)}")


def _check_collectives(program: Program, done: Outcome) -> None:
    """Other ranks may run another form of the graph, and wait for what this one sends."""
    before = collectives(program.gm.graph)
    for after in (done.program, done.base):
        if collectives(after.gm.graph) != before:
            raise PassError(f"the graph has {len(before)} collectives, and others after the passes: ranks would hang")


@dataclass(frozen=True)
class Pass:
    """One step. ``work`` returns how many changes it made, or how many things it found.

    ``changes`` is empty for an analysis, which reads the graph and never edits it.
    """

    name: str
    reads: str
    changes: str
    work: Callable[[_State], int] = field(repr=False)


def _canonical(name: str) -> Callable[[_State], int]:
    return lambda state: CANONICAL[name](state.program)


def _analyse(state: _State) -> int:
    return len(state.analysis.sites)


def _judge(state: _State) -> int:
    state.verdicts = state.analysis.judged(state.options.forms, state.folding, sparse=state.options.sparse == "auto")
    return len(state.verdicts)


def _split_heads(state: _State) -> int:
    """Splits attentions whose heads are made of different things, on a copy, as long as that absorbs more of each."""
    candidates = {
        v.site.node.name
        for v in state.verdicts
        if v.site.node.name not in state.failed and groups_of(v, state.analysis.maps) is not None
    }
    told: dict[str, Unsplit] = {}
    while candidates:
        # A fresh copy each round: the splits of the last one are in its graph.
        trial = analyse(state.program.copy())
        whole = {
            v.site.node.name: v
            for v in trial.judged(state.options.forms, state.folding, sparse=state.options.sparse == "auto")
        }
        groups = [groups_of(v, trial.maps) for name, v in whole.items() if name in candidates]
        splits = split_heads([g for g in groups if g is not None], trial.program.fake_mode)
        remove_dead_code(trial.program.gm.graph)
        trial = analyse(trial.program)
        verdicts = trial.judged(state.options.forms, state.folding, sparse=state.options.sparse == "auto")
        by_node = {v.site.node: v for v in verdicts}
        useless = {s.name: unsplit(s, by_node) for s in splits if not gains(s, whole[s.name], by_node)}
        if not useless:
            state.adopt(trial, verdicts, splits)
            break
        told.update(useless)
        candidates -= useless.keys()
    state.verdicts = [told.get(v.site.node.name, Unsplit()).told(v) for v in state.verdicts]
    return len(state.splits)


def _unfollowed(state: _State) -> int:
    state.lost = unfollowed(state.graph, state.analysis.weights, state.analysis.sites)
    return len(state.lost)


def _absorb(state: _State) -> int:
    state.verdicts = [
        replace(v, code=state.failed[v.site.node.name][0], reason=state.failed[v.site.node.name][1])
        if v.site.node.name in state.failed
        else v
        for v in state.verdicts
    ]
    # Before the first rewrite: what is drawn as "before" has to be there.
    if state.draw:
        state.sketch = Sketch(copy_graph(state.graph), {n.name for n in state.analysis.weights})
    lengths = Lengths()
    state.rewritten = [
        absorb(v.plan, state.program.fake_mode, lengths, merges=_folds(v)) for v in state.chosen if v.plan is not None
    ]
    remove_dead_code(state.graph)
    return len(state.rewritten)


def _verify(state: _State) -> int:
    """One check per distinct site, its result given to all sites that are the same computation.

    An attention that was split by heads is compared as a whole with what it was.
    """
    if state.untouched is None:
        return 0
    untouched, weights = state.untouched.gm.graph, state.program.weights
    done: dict[tuple[object, ...], Check] = {}
    grouped = {g.node for s in state.splits for g in s.groups}
    for site in state.rewritten:
        if site.plan.site.node in grouped:
            continue
        key = key_of(site.plan)
        if key not in done:
            done[key] = check_site(site.plan, site.out, untouched, weights)
        state.checks[site.plan.site.node.name] = done[key]
    by_node = {v.site.node: v for v in state.verdicts}
    for split in state.splits:
        groups = [by_node[g.node] for g in split.groups]
        state.checks[split.name] = check_split(split, groups, untouched, weights)
    return len(state.checks)


def _index(state: _State) -> int:
    """One operator for the scores of each indexer whose list of keys an attention reads."""
    if state.options.lowering == "aten":
        return 0
    lists = [v.plan.visible.chosen for v in state.chosen if v.plan is not None]
    done: dict[tuple[object, ...], Check] = {}
    written = 0
    for found in indexers((one for one in lists if one is not None), state.analysis.weights):
        new = index_scores(found, state.program.fake_mode)
        if state.untouched is not None:
            key = index_key(found)
            if key not in done:
                done[key] = check_index(found, new, state.untouched.gm.graph, state.program.weights)
            if (problem := done[key].problem) is not None:
                if state.options.strict:
                    raise VerificationError(f"an indexer in one operator {problem}; it was not used")
                state.messages += (_INDEX_STAYS.format(problem=problem),)
                continue
        found.out.node.replace_all_uses_with(new)
        written += 1
    remove_dead_code(state.graph)
    return written


def _folds(verdict: Verdict) -> bool:
    return verdict.choice is not None and (verdict.choice.fold_query or verdict.choice.fold_output)


def _fold(state: _State) -> int:
    if not any(map(_folds, state.chosen)):
        return 0
    # New maps, because those of the analysis are of a graph that absorb has changed.
    maps = LinearMaps(weights_of(state.program), state.program.fake_mode)
    state.folded = fold(state.program, maps, state.rewritten, state.chosen)
    return sum(map(len, state.folded.values()))


def _dequantize(state: _State) -> int:
    return dequantize_once(state.program, weights_of(state.program), state.rewritten, state.options.dequantize)


def _narrow(state: _State) -> int:
    alone = [pair for v in state.chosen for pair in v.narrowed]
    return narrow(alone, LinearMaps(weights_of(state.program), state.program.fake_mode)) if alone else 0


def _settle(state: _State) -> int:
    done = settle(state.graph)
    remove_dead_code(state.graph)
    return done


def _lower(state: _State) -> int:
    return lower_to_aten(state.graph, state.program.fake_mode) if state.options.lowering == "aten" else 0


def _lower_projections(state: _State) -> int:
    done = lower_projections(state.graph, state.program.fake_mode)
    remove_dead_code(state.graph)
    return done


def _read_parts(state: _State) -> int:
    return read_parts(state.graph, state.program.fake_mode)


def _read_packed(state: _State) -> int:
    return read_packed(state.graph, state.program.fake_mode, _reads_float8)


def _reads_float8(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and native.load() is not None)


def _few_rows(state: _State) -> int:
    if state.options.products != "native" or state.options.lowering == "aten" or not state.rewritten:
        return 0
    weights = weights_of(state.program)
    return few_rows(state.graph, state.program.fake_mode, weights, linear.pays, linear.LEAST_BYTES)


def _schedule(state: _State) -> int:
    return share_schedules(state.graph, state.program.fake_mode)


def _append(state: _State) -> int:
    if state.options.appends != "in_place" or not any(v.plan is not None for v in state.verdicts):
        return 0
    # Of two programs for the same inputs, both would have to append in place.
    one_form = state.rewritten and not any(v.by_call for v in state.chosen)
    return append_in_place(state.program, rewrite=bool(one_form))


PASSES = (
    Pass("normalize", "the captured graph", "checks and empty operators", _canonical("normalize")),
    Pass("views", "the captured graph", "the spelling of views, permutations, slices and joins", _canonical("views")),
    Pass("split_products", "products beside a softmax", "those that add something", _canonical("split_products")),
    Pass("write_softmax", "exponentials between products", "a softmax written out", _canonical("write_softmax")),
    Pass("analyse", "the canonical graph", "", _analyse),
    Pass("judge", "attentions and linear maps", "", _judge),
    Pass("split_heads", "verdicts, heads of other making", "attentions, on a copy that is kept", _split_heads),
    Pass("unfollowed", "softmaxes that are no attention", "", _unfollowed),
    Pass("absorb", "verdicts", "attentions that were judged legal and worth it", _absorb),
    Pass("verify", "the rewritten and the untouched graph", "", _verify),
    Pass("index", "lists of keys", "scores that they were chosen by, to one operator", _index),
    Pass("fold", "verdicts, absorbed queries and outputs", "products of weights", _fold),
    Pass("dequantize", "quantized weights of absorbed attentions", "those to be kept, to inputs", _dequantize),
    Pass("narrow", "verdicts", "up-projections of which a part is still read", _narrow),
    Pass("settle", "stand-ins", "those that are still read, to the operators of libraries", _settle),
    Pass("lower", "the operator that absorb writes", "it, to plain ATen where that is asked for", _lower),
    Pass("lower_projections", "einsums that were added", "those of few rows", _lower_projections),
    Pass("read_parts", "slices that were added", "those of a join, to its parts", _read_parts),
    Pass("read_packed", "rows in float8", "copies of them, to operators that read them", _read_packed),
    Pass("few_rows", "products with weights", "those of a few rows on a CPU, to an operator that is faster", _few_rows),
    Pass("schedule", "operators on a GPU, their masks", "what they prepare, to once for all that can share", _schedule),
    Pass("append", "joins of rows that the caller keeps", "those of old and new ones, to writes in place", _append),
)
"""The passes after the cache: what each reads, and what it changes."""


def _site_cost(verdict: Verdict) -> SiteCost:
    assert verdict.plan is not None
    chosen = verdict.plan.visible.chosen
    return SiteCost(verdict.plan.dims, *verdict.plan.sizes(), verdict.parts, chosen and chosen.size)
