"""Passes that rewrite attentions and surrounding code according to the verdicts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from mla_compile.codes import Code
from mla_compile.core.program import copy_graph
from mla_compile.errors import VerificationError
from mla_compile.passes.attention.indexer import indexers
from mla_compile.passes.cache.append import append_in_place
from mla_compile.passes.cache.held import held
from mla_compile.passes.cache.share import begun_rows, grown_rows, share_rows
from mla_compile.passes.ir import stand_in
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.report.draw import Sketch
from mla_compile.passes.report.heads import attentions
from mla_compile.passes.report.site import fused_told
from mla_compile.passes.rewrite import dequantize, fold, narrow
from mla_compile.passes.rewrite.absorb import absorb as absorb_site
from mla_compile.passes.rewrite.by_hand import fuse
from mla_compile.passes.rewrite.complex_pairs import real_rotations
from mla_compile.passes.rewrite.equal_widths import equal_widths
from mla_compile.passes.rewrite.index import index_scores
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.linear_operator import lower_products
from mla_compile.passes.rewrite.project import Heads, lower_projections
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.verify.comparison import Checks
from mla_compile.passes.verify.others import index_comparison, split_comparison
from mla_compile.passes.verify.sites import site_comparison
from mla_compile.pipeline.analyses import linear_maps, read_weights, weights
from mla_compile.pipeline.large import expanded
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState

_UNSHARED = "ranks no longer share the rows of this cache; each rank has all rows from now on: {problem}"
_GATHERED = "the rows of a cache that ranks share are gathered in every call of this graph: {problem}"
_NOT_SHARED = (
    "context_parallel: each rank has all rows of this cache. Ranks share the rows of a cache only if it began in a "
    "call of this model, grows by cat or is written in place, and holds the rows themselves"
)
_NOT_ONE_FORM = "no attention is absorbed in every call"
_INDEX_STAYS = "an indexer stays as the model computes it: as one operator it {problem}"


def absorb(state: PassState) -> int:
    """Absorb attentions if this pays. Replace hand-absorbed attentions by the operator if a kernel runs it."""
    state.verdicts = [_unless_failed(v, state) for v in state.verdicts]
    # Find the rows that ranks will share before absorbing. Absorbed attentions read sources instead of returned rows
    # and inputs.
    if state.program.capture.sharing is not None:
        state.shared = begun_rows(state.program, state.verdicts)
    _note_caches(state)
    # Copy the graph before the first rewrite, because the "before" drawing needs the original nodes.
    if state.request.draw:
        state.sketch = Sketch(copy_graph(state.graph), {n.name for n in state.analyses.get(weights)})
    lengths, fake_mode = Lengths(), state.program.fake_mode
    state.rewritten = [
        absorb_site(v.plan, fake_mode, lengths, merges=_folds(v)) for v in state.chosen if v.plan is not None
    ]
    state.fused = _fused(state, lengths)
    remove_dead_code(state.graph)
    return len(state.rewritten) + len(state.fused)


def _unless_failed(verdict: Verdict, state: PassState) -> Verdict:
    if verdict.site.node.name not in state.failed:
        return verdict
    code, reason = state.failed[verdict.site.node.name]
    return replace(verdict, code=code, reason=reason)


def _note_caches(state: PassState) -> None:
    """Record what the caches of attentions hold."""
    for name, group in attentions(state.verdicts, state.splits).items():
        plans = [v.plan for v in group if v.plan is not None and v.absorb and v.plan.keys and v.plan.vals]
        found = held(plans, state.base.cache) if len(plans) == len(group) else None
        if found is not None:
            state.held[name] = found


def _fused(state: PassState, lengths: Lengths) -> list[Absorbed]:
    """Replace hand-absorbed attentions by the operator if a kernel runs it.

    In a file, replace only steps over shared rows.
    """
    done: list[Absorbed] = []
    if state.options.lowering == "aten":
        return done
    for i, verdict in enumerate(state.verdicts):
        fusion = verdict.fusion
        if fusion is None or verdict.site.node.name in state.failed:
            continue
        # The kernels that will run a file are unknown, so a file gets the operator only for steps over shared rows. In
        # calls with many queries, code without a kernel would gather the listed rows of all queries. Other
        # hand-absorbed attentions keep their operators: every runtime has them, and no row is copied to every head.
        in_file = fusion.is_step and verdict.code is Code.SHARED_ROWS
        if not (in_file if state.request.frozen else state.request.target.runs(val(fusion.plan.latent.node))):
            continue
        done.append(fuse(fusion, state.program.fake_mode, lengths))
        state.verdicts[i] = replace(verdict, notes=(*verdict.notes, *fused_told(fusion)))
    return done


def verify(state: PassState) -> int:
    """Check each distinct site once, and use the result for all sites with an equal computation.

    If an attention was split by heads, the whole attention is compared with the original.
    """
    if (untouched := state.untouched) is None:
        return 0
    own = state.program.weights
    checks, grouped = Checks(own), {g.node for s in state.splits for g in s.groups}
    for site in (*state.rewritten, *state.fused):
        if site.plan.site.node not in grouped:
            compared = site_comparison(site.plan, site.out, untouched, site.given, own)
            state.checks[site.plan.site.node.name] = checks.check(compared)
    by_node = {v.site.node: v for v in state.verdicts}
    for split in state.splits:
        groups = [by_node[g.node] for g in split.groups]
        state.checks[split.name] = checks.check(split_comparison(split, groups, untouched, own))
    return len(state.checks)


def index(state: PassState) -> int:
    """Compute each indexer's scores with one operator, if an attention reads the indexer's list."""
    if state.options.lowering == "aten":
        return 0
    plans = [v.plan for v in state.chosen if v.plan is not None]
    fused = {done.plan.site.node for done in state.fused}
    plans += [p for v in state.verdicts if v.fusion is not None and v.site.node in fused for p in v.fusion.each]
    lists = [plan.visible.chosen for plan in plans if plan.visible.chosen is not None]
    checks = Checks(state.program.weights)
    written = 0
    for found in indexers(lists, state.analyses.get(weights)) if lists else ():
        new = index_scores(found, state.program.fake_mode)
        if state.untouched is not None:
            compared = index_comparison(found, new, state.untouched, state.program.weights)
            if (problem := checks.check(compared).problem) is not None:
                if state.options.strict:
                    raise VerificationError(f"an indexer as one operator {problem}; it was not used")
                state.messages += (_INDEX_STAYS.format(problem=problem),)
                remove_dead_code(state.graph)
                continue
        found.out.node.replace_all_uses_with(new)
        written += 1
    if written:
        remove_dead_code(state.graph)
    return written


def _folds(verdict: Verdict) -> bool:
    return verdict.choice is not None and (verdict.choice.fold_query or verdict.choice.fold_output)


def fold_weights(state: PassState) -> int:
    """Multiply weights ahead of time if a verdict says so."""
    if not any(map(_folds, state.chosen)):
        return 0
    state.folded = fold.fold(state.program, state.analyses.get(linear_maps), state.rewritten, state.chosen)
    return sum(map(len, state.folded.values()))


def dequantize_once(state: PassState) -> int:
    """Take dequantized weights of absorbed attentions as inputs if this saves time."""
    if state.options.dequantize == "step" or not state.rewritten:
        return 0
    own, mode = state.analyses.get(weights), state.options.dequantize
    return dequantize.dequantize_once(state.program, own, state.rewritten, mode, _heads(state))


def narrow_projections(state: PassState) -> int:
    """Compute only the columns of an up-projection that are still read."""
    alone = [pair for v in state.chosen for pair in v.narrowed]
    return narrow.narrow(alone, state.analyses.get(linear_maps)) if alone else 0


def settle(state: PassState) -> int:
    """Restore library operators whose stand-ins are still read."""
    if not any(map(stand_in.waits, state.graph.nodes)):
        return 0
    done = stand_in.settle(state.graph)
    remove_dead_code(state.graph)
    state.analyses.invalidate()
    return done


def project(state: PassState) -> int:
    """Lower the products with weights that absorption added."""
    own, fake_mode = state.analyses.get(read_weights), state.program.fake_mode
    done = lower_projections(state.graph, fake_mode, own, _heads(state))
    remove_dead_code(state.graph)
    return done


def products(state: PassState) -> int:
    """Replace products with weights by an operator of this library if it is faster, in graphs of latent attentions."""
    if not _native_products(state) or not _attended(state):
        return 0
    operator = state.request.target.linear

    def replaced(known: Analyses) -> int:
        program = known.program
        # The program of calls that do not absorb is for many rows, which are not multiplied by packed weights.
        packs = program is state.program and state.options.dequantize != "step"
        keep = functools.partial(fold.keep, program, name="packed", dtype=torch.int32) if packs else None
        return lower_products(program.gm.graph, program.fake_mode, known.get(read_weights), operator, keep)

    return _in_all_calls(state, replaced)


def pad_values(state: PassState) -> int:
    """Pad the values of expanded attentions that torch's fused attention computes only for equal widths."""
    if state.request.frozen or not _attended(state):  # the kernels that will run a file are unknown
        return 0
    return _in_all_calls(state, lambda known: equal_widths(known.program.gm.graph, known.program.fake_mode))


def complex_pairs(state: PassState) -> int:
    """Replace complex numbers by pairs of real ones, if Inductor compiles the graph."""
    if state.request.frozen or state.options.codegen != "inductor" or not _attended(state):
        return 0
    return _in_all_calls(state, lambda known: real_rotations(known.program.gm.graph, known.program.fake_mode))


def _in_all_calls(state: PassState, rewrite: Callable[[Analyses], int]) -> int:
    """Rewrite the program, and the program of calls that do not absorb; return the changes in the former.

    The results of ``rewrite`` must be faster, and otherwise equal.
    """
    done = rewrite(state.analyses)
    state.faster += done
    if any(v.by_call for v in state.chosen):
        others = expanded(state)
        if rewrite(others):
            others.program.gm.recompile()
            state.expanded = others.program
    return done


def _heads(state: PassState) -> Heads | None:
    if not _native_products(state):
        return None
    target = state.request.target
    return Heads(target.reads_heads, target.linear.least_bytes, target.most_of_heads)


def _native_products(state: PassState) -> bool:
    # Each of several ranks would choose according to its own measurements. But all ranks compute the next token, and
    # their results must be bitwise equal.
    options = state.options
    return options.products == "native" and options.lowering != "aten" and state.request.target.ranks == 1


def share(state: PassState) -> int:
    """Rewrite attention to read only this rank's rows, if all shared caches allow this."""
    program = state.program
    if not program.capture.shared:
        return 0
    problem = share_rows(program) if _one_form(state) else _NOT_ONE_FORM
    several = any(v.by_call for v in state.chosen)
    if problem is None:
        return sum(one.shared for one in program.appends)
    buffers = program.capture.shared.intersection(program.mutations)
    if several:
        state.shared |= grown_rows(program)  # a prompt: ranks share the new rows after the call
    elif program.capture.shared - buffers:
        state.warnings += (_UNSHARED.format(problem=problem),)
    if buffers and not several and not _is_prompt(state):
        state.warnings += (_GATHERED.format(problem=problem),)
    return 0


def _is_prompt(state: PassState) -> bool:
    """Whether absorbing does not pay in any latent attention because the call has too many queries."""
    codes = {v.code for v in state.verdicts if v.plan is not None}
    return codes == {Code.COST_PREFILL}


def _one_form(state: PassState) -> bool:
    return bool(state.rewritten) and _in_one_form(state)


def _in_one_form(state: PassState) -> bool:
    return bool(state.rewritten or state.fused) and not any(v.by_call for v in state.chosen)


def _attended(state: PassState) -> bool:
    """Whether the graph has an attention over shared rows, absorbed or not."""
    return bool(state.fused) or any(v.plan is not None for v in state.verdicts)


def append(state: PassState) -> int:
    """Write new rows in place after the old rows."""
    if state.options.appends != "in_place" or not _attended(state):
        return 0
    # If each call chooses between two programs, the two must take equal inputs, so neither writes in place.
    count = append_in_place(state.program, rewrite=_in_one_form(state), shared=state.shared)
    if state.program.capture.sharing is not None and _one_form(state):
        shared = state.program.capture.shared or any(one.shared for one in state.program.appends)
        state.warnings += () if shared else (_NOT_SHARED,)
    return count
