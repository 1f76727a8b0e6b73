"""The table of passes in order: what each reads, what it changes, and how it runs on a :class:`PassState`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from mla_compile.analysis import analyse, canonicalize, copy_with_origins, weights_of
from mla_compile.by_heads import ByHeads, group_heads, is_large
from mla_compile.codes import CODES, Code
from mla_compile.core.program import Program, copy_graph
from mla_compile.errors import VerificationError
from mla_compile.kernels import launch, linear
from mla_compile.kernels.cpu import native
from mla_compile.pass_state import PassState
from mla_compile.passes.attention.indexer import indexers
from mla_compile.passes.attention.unfollowed import unfollowed
from mla_compile.passes.cache.append import append_in_place
from mla_compile.passes.cache.share import begun_rows, grown_rows, share_rows
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.walk import remove_dead_code, weight_nodes
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import Unsplit, gains, groups_of, unsplit
from mla_compile.passes.report.site import fused_told
from mla_compile.passes.rewrite.absorb import absorb
from mla_compile.passes.rewrite.by_hand import fuse
from mla_compile.passes.rewrite.columns import read_parts
from mla_compile.passes.rewrite.dequantize import dequantize_once
from mla_compile.passes.rewrite.few_rows import few_rows
from mla_compile.passes.rewrite.fold import fold
from mla_compile.passes.rewrite.index import index_scores
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.lower import lower_to_aten
from mla_compile.passes.rewrite.narrow import narrow
from mla_compile.passes.rewrite.packed_rows import read_packed
from mla_compile.passes.rewrite.project import Heads, lower_projections
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.rewrite.schedule import share_schedules
from mla_compile.passes.rewrite.split_heads import split_heads
from mla_compile.passes.verify.comparison import Checks
from mla_compile.passes.verify.index import index_comparison
from mla_compile.passes.verify.sites import site_comparison
from mla_compile.passes.verify.split import split_comparison

_UNSHARED = "ranks no longer share the rows of this cache; each rank has all rows from now on: {problem}"
_GATHERED = "the rows of a cache that ranks share are gathered in every call of this graph: {problem}"
_NOT_SHARED = (
    "context_parallel: each rank has all rows of this cache. Ranks share the rows of a cache only if it began in a "
    "call of this model, grows by cat or is written in place, and holds the rows themselves"
)
_NOT_ONE_FORM = "no attention is absorbed in every call"
_INDEX_STAYS = "an indexer stays as the model computes it: as one operator it {problem}"


@dataclass(frozen=True)
class Pass:
    """One pass. ``work`` returns how many changes it made, or things it found; an analysis has no ``changes``."""

    name: str
    reads: str
    changes: str
    work: Callable[[PassState], int] = field(repr=False)


def _canonical(name: str) -> Callable[[PassState], int]:
    return lambda state: state.canonicalize(name)


def _analyse(state: PassState) -> int:
    return len(state.analysis.sites)


def _judge(state: PassState) -> int:
    state.verdicts = state.analysis.judged(state.options.forms, state.folding, sparse=state.options.sparse == "auto")
    return len(state.verdicts)


def _split_heads(state: PassState) -> int:
    """Split attentions whose heads are computed differently, on a copy, as long as that absorbs more of each."""
    candidates = {
        v.site.node.name
        for v in state.verdicts
        if v.site.node.name not in state.failed and groups_of(v, state.analysis.maps) is not None
    }
    told: dict[str, Unsplit] = {}
    while candidates:
        # Each round needs a fresh copy: the last trial's graph contains its splits.
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


def _unfollowed(state: PassState) -> int:
    state.lost = unfollowed(state.graph, state.analysis.weights, state.analysis.sites)
    state.lost += state.analysis.without_softmax()
    return len(state.lost)


def _absorb(state: PassState) -> int:
    state.verdicts = [
        replace(v, code=state.failed[v.site.node.name][0], reason=state.failed[v.site.node.name][1])
        if v.site.node.name in state.failed
        else v
        for v in state.verdicts
    ]
    # before absorbing: attentions still read the returned rows, not the sources of these
    if state.program.sharing is not None:
        state.shared = begun_rows(state.program, state.verdicts)
    state.note_caches()
    # Before the first rewrite: the "before" drawing needs the original nodes.
    if state.draw:
        state.sketch = Sketch(copy_graph(state.graph), {n.name for n in state.analysis.weights})
    lengths = Lengths()
    state.rewritten = [
        absorb(v.plan, state.program.fake_mode, lengths, merges=_folds(v)) for v in state.chosen if v.plan is not None
    ]
    state.fused = _fused(state, lengths)
    remove_dead_code(state.graph)
    return len(state.rewritten) + len(state.fused)


def _fused(state: PassState, lengths: Lengths) -> list[Absorbed]:
    """Replace hand-absorbed attentions by the operator, if a kernel runs it."""
    done: list[Absorbed] = []
    if state.options.lowering == "aten":
        return done
    for i, verdict in enumerate(state.verdicts):
        fusion = verdict.fusion
        if fusion is None or verdict.site.node.name in state.failed:
            continue
        # In a file, whose kernels are not known, listed rows of many queries would be gathered, and what is absorbed by
        # hand stays in operators that every runtime has, none of which copies a row to every head.
        in_file = fusion.is_step and verdict.code is Code.SHARED_ROWS
        if not (in_file if state.frozen else _is_fast(val(fusion.plan.latent.node))):
            continue
        done.append(fuse(fusion, state.program.fake_mode, lengths))
        state.verdicts[i] = replace(verdict, notes=(*verdict.notes, *fused_told(fusion)))
    return done


def _is_fast(rows: torch.Tensor) -> bool:
    """Whether a kernel runs the operator over such rows: the reference is no faster than the model's own code."""
    if rows.device.type == "cuda":  # a traced tensor may be on "cuda" where there is no GPU
        return torch.cuda.is_available() and launch.reads(rows)
    return rows.device.type == "cpu" and native.load() is not None


def _verify(state: PassState) -> int:
    """Check each distinct site once, and give the result to all sites that are the same computation.

    An attention that was split by heads is compared with its original as a whole.
    """
    if state.untouched is None:
        return 0
    weights = state.program.weights
    untouched, checks = _by_name(state.untouched), Checks(weights)
    grouped = {g.node for s in state.splits for g in s.groups}
    for site in (*state.rewritten, *state.fused):
        if site.plan.site.node not in grouped:
            compared = site_comparison(site.plan, site.out, untouched, site.given, weights)
            state.checks[site.plan.site.node.name] = checks.check(compared)
    by_node = {v.site.node: v for v in state.verdicts}
    for split in state.splits:
        groups = [by_node[g.node] for g in split.groups]
        state.checks[split.name] = checks.check(split_comparison(split, groups, untouched, weights))
    return len(state.checks)


def _by_name(program: Program) -> dict[str, fx.Node]:
    return {node.name: node for node in program.gm.graph.nodes}


def _index(state: PassState) -> int:
    """Compute the scores of each indexer with one operator, if an attention reads its index list."""
    if state.options.lowering == "aten":
        return 0
    plans = [v.plan for v in state.chosen if v.plan is not None]
    fused = {done.plan.site.node for done in state.fused}
    plans += [p for v in state.verdicts if v.fusion is not None and v.site.node in fused for p in v.fusion.each]
    lists = [plan.visible.chosen for plan in plans]
    untouched, checks = None if state.untouched is None else _by_name(state.untouched), Checks(state.program.weights)
    written = 0
    for found in indexers((one for one in lists if one is not None), state.analysis.weights):
        new = index_scores(found, state.program.fake_mode)
        if untouched is not None:
            compared = index_comparison(found, new, untouched, state.program.weights)
            if (problem := checks.check(compared).problem) is not None:
                if state.options.strict:
                    raise VerificationError(f"an indexer as one operator {problem}; it was not used")
                state.messages += (_INDEX_STAYS.format(problem=problem),)
                continue
        found.out.node.replace_all_uses_with(new)
        written += 1
    remove_dead_code(state.graph)
    return written


def _folds(verdict: Verdict) -> bool:
    return verdict.choice is not None and (verdict.choice.fold_query or verdict.choice.fold_output)


def _fold(state: PassState) -> int:
    if not any(map(_folds, state.chosen)):
        return 0
    # Absorbing has changed the graph, so the analysis' maps are stale.
    maps = LinearMaps(weights_of(state.program), state.program.fake_mode)
    state.folded = fold(state.program, maps, state.rewritten, state.chosen)
    return sum(map(len, state.folded.values()))


def _dequantize(state: PassState) -> int:
    weights, mode = weights_of(state.program), state.options.dequantize
    return dequantize_once(state.program, weights, state.rewritten, mode, _heads(state))


def _narrow(state: PassState) -> int:
    alone = [pair for v in state.chosen for pair in v.narrowed]
    return narrow(alone, LinearMaps(weights_of(state.program), state.program.fake_mode)) if alone else 0


def _settle(state: PassState) -> int:
    done = settle(state.graph)
    remove_dead_code(state.graph)
    return done


def _by_heads(state: PassState) -> int:
    """Compute large expanded attentions for a few heads at a time, in the program and in its expanded variant."""
    limit = state.options.expanded_bytes
    if limit is None:
        return 0
    # Only expanded latent attentions are grouped: other models keep their graphs, and get no extra guard.
    kept = {
        v.site.node.name
        for v in state.verdicts
        if CODES[v.code].verdict == "kept" and v.code is not Code.ALREADY_ABSORBED
    }
    done = _grouped(state, state.program, kept)
    state.by_heads, state.head_notes = done.done, done.notes
    if any(v.by_call and is_large(v.site, limit, guard=state.recompiles) for v in state.chosen):
        expanded = copy_with_origins(state.base)
        canonicalize(expanded)
        settle(expanded.gm.graph)
        remove_dead_code(expanded.gm.graph)
        other = _grouped(state, expanded, None)
        state.head_notes |= {name: f"where it is expanded, {note}" for name, note in other.notes.items()}
        if other.done:
            expanded.gm.recompile()
            state.expanded = expanded
    return state.by_heads


def _grouped(state: PassState, program: Program, names: Collection[str] | None) -> ByHeads:
    untouched = None if state.untouched is None else state.untouched.gm.graph
    return group_heads(
        program,
        state.options,
        untouched,
        lambda site: names is None or site.node.name in names,
        guard=state.recompiles,
    )


def _lower(state: PassState) -> int:
    return lower_to_aten(state.graph, state.program.fake_mode) if state.options.lowering == "aten" else 0


def _lower_projections(state: PassState) -> int:
    done = lower_projections(state.graph, state.program.fake_mode, _read_weights(state), _heads(state))
    remove_dead_code(state.graph)
    return done


def _read_weights(state: PassState) -> set[fx.Node]:
    """The nodes that are computed from weights and from inputs that hold products of weights, or dequantized ones."""
    kept = {fold.placeholder for fold in state.program.folds}
    return weight_nodes(state.graph, {*state.program.weights, *kept})


def _read_parts(state: PassState) -> int:
    return read_parts(state.graph, state.program.fake_mode)


def _read_packed(state: PassState) -> int:
    return read_packed(state.graph, state.program.fake_mode, _reads_float8)


def _reads_float8(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and native.load() is not None)


def _few_rows(state: PassState) -> int:
    if not _native_products(state) or not state.rewritten:
        return 0
    weights = _read_weights(state)
    return few_rows(state.graph, state.program.fake_mode, weights, linear.pays, linear.LEAST_BYTES, linear.MOST)


def _native_products(state: PassState) -> bool:
    # Each rank would choose by its own measurement, but the next token, which all ranks compute, must agree to the last
    # bit.
    return state.options.products == "native" and state.options.lowering != "aten" and not _several_ranks()


def _heads(state: PassState) -> Heads | None:
    if not _native_products(state):
        return None
    return Heads(linear.reads_heads, linear.LEAST_BYTES, linear.MOST_OF_HEADS)


def _several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _schedule(state: PassState) -> int:
    return share_schedules(state.graph, state.program.fake_mode)


def _share(state: PassState) -> int:
    """Rewrite attention to read this rank's rows, if the rows of all caches that ranks share allow it."""
    program = state.program
    if not program.shared:
        return 0
    problem = share_rows(program) if _one_form(state) else _NOT_ONE_FORM
    several = any(v.by_call for v in state.chosen)
    if problem is None:
        return sum(one.shared for one in program.appends)
    buffers = program.shared.intersection(program.mutations)
    if several:
        state.shared |= grown_rows(program)  # a prompt: ranks share its rows after the call
    elif program.shared - buffers:
        state.warnings += (_UNSHARED.format(problem=problem),)
    if buffers and not several and not _is_prompt(state):
        state.warnings += (_GATHERED.format(problem=problem),)
    return 0


def _is_prompt(state: PassState) -> bool:
    """Whether a call has more queries than absorbing pays for."""
    codes = {v.code for v in state.verdicts if v.plan is not None}
    return codes == {Code.COST_PREFILL}


def _one_form(state: PassState) -> bool:
    return bool(state.rewritten) and _in_one_form(state)


def _in_one_form(state: PassState) -> bool:
    return bool(state.rewritten or state.fused) and not any(v.by_call for v in state.chosen)


def _append(state: PassState) -> int:
    attended = state.fused or any(v.plan is not None for v in state.verdicts)
    if state.options.appends != "in_place" or not attended:
        return 0
    # If two programs run on the same inputs, either both append in place or neither does.
    count = append_in_place(state.program, rewrite=_in_one_form(state), shared=state.shared)
    if state.program.sharing is not None and _one_form(state):
        shared = state.program.shared or any(one.shared for one in state.program.appends)
        state.warnings += () if shared else (_NOT_SHARED,)
    return count


PASSES = (
    Pass("normalize", "the captured graph", "checks and empty operators", _canonical("normalize")),
    Pass("views", "the captured graph", "the spelling of views, permutations, slices and joins", _canonical("views")),
    Pass("split_products", "products beside a softmax", "products that also add", _canonical("split_products")),
    Pass("write_softmax", "exponentials between products", "a decomposed softmax", _canonical("write_softmax")),
    Pass("analyse", "the canonical graph", "", _analyse),
    Pass("judge", "attentions and linear maps", "", _judge),
    Pass("split_heads", "verdicts, heads that differ", "attentions, on a copy that is kept", _split_heads),
    Pass("unfollowed", "softmaxes outside attentions, attentions without softmax", "", _unfollowed),
    Pass("absorb", "verdicts", "attentions that are legal and worth absorbing", _absorb),
    Pass("verify", "the rewritten and the untouched graph", "", _verify),
    Pass("index", "index lists", "scores of indexers, to one operator", _index),
    Pass("fold", "verdicts, absorbed queries and outputs", "products of weights", _fold),
    Pass("dequantize", "quantized weights of absorbed attentions", "weights dequantized once, to inputs", _dequantize),
    Pass("narrow", "verdicts", "up-projections that are partly read", _narrow),
    Pass("settle", "stand-ins", "stand-ins that are still read, to the operators of libraries", _settle),
    Pass("by_heads", "attentions that stay expanded", "large attentions, to groups of heads", _by_heads),
    Pass("lower", "operators that absorb adds", 'operators, to plain ATen with lowering="aten"', _lower),
    Pass("lower_projections", "einsums that absorb adds", "einsums of few rows", _lower_projections),
    Pass("read_parts", "slices that absorb adds", "slices of a join, to its parts", _read_parts),
    Pass("read_packed", "rows in float8", "reads of copies, to reads of the packed rows", _read_packed),
    Pass("share", "rows that ranks share", "attention, to each rank's own rows and a merge", _share),
    Pass("few_rows", "products with weights", "products of few rows on a CPU, to a faster operator", _few_rows),
    Pass("schedule", "operators on a GPU, their masks", "launch preparation, hoisted and shared", _schedule),
    Pass("append", "joins of rows that the caller keeps", "joins of old and new rows, to in-place writes", _append),
)
"""The passes that follow the rewrite of caches."""
