"""Passes before the rewrites: stand-ins, canonicalisation, rows in place of K and V, verdicts, split heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mla_compile.passes.cache.keep import KeptRows, keep_rows
from mla_compile.passes.cost.cost import default_device
from mla_compile.passes.decide.head_groups import HeadGroups, Unsplit, gains, groups_of, unsplit
from mla_compile.passes.fused.read import add_plain_attention, has_flex, has_fused
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.quantized.read import add_stand_ins, is_quantized
from mla_compile.passes.rewrite.split_heads import split_heads as split
from mla_compile.passes.sources.records import Verdict
from mla_compile.pipeline.analyses import (
    CANONICAL,
    Judgement,
    canonicalize,
    linear_maps,
    lost,
    site_maps,
    sites,
    sliced_maps,
    weights,
)
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState

_LEGAL = Judgement("absorbed", "never", device=default_device("cpu"), slices=False)
"""Judges only whether absorbing is legal, not whether it pays."""


def stand_ins(state: PassState) -> int:
    """Add plain operators as stand-ins for library operators."""
    program, graph = state.program, state.graph
    if has_flex(graph):  # readers of flex_attention's results are recognised only in canonical spelling
        for name in ("normalize", "views"):
            CANONICAL[name](state.analyses)
    fused, quantized, exact = has_fused(graph), is_quantized(graph), state.options.quantized == "exact"
    added = add_plain_attention(graph, program.fake_mode) if fused else 0
    if quantized:
        added += add_stand_ins(graph, state.analyses.get(weights), program.fake_mode, exact=exact)
    if added or fused or (quantized and exact):
        state.rebase()
    return added


def canonical(name: str) -> Callable[[PassState], int]:
    """Return the pass ``name`` of :data:`~mla_compile.pipeline.analyses.CANONICAL`."""
    return lambda state: CANONICAL[name](state.analyses)


def latent_cache(state: PassState) -> int:
    """Replace K and V that the caller keeps by rows.

    The K and V of an attention are replaced only if the attention can then be absorbed. Otherwise every call would have
    to expand the rows. If some attentions cannot be absorbed, the replacement is tried again on a fresh copy without
    these attentions.
    """
    if state.options.cache != "latent":
        return 0
    refused: set[str] = set()
    trial = state.analyses
    while True:
        kept = _keep(trial, state, refused)
        if not kept.sides:
            # The analyses of this copy are valid for the following passes.
            state.analyses = trial
            return 0
        wrong = kept.torn
        if not wrong:
            trial = Analyses(trial.program)
            canonicalize(trial)
            wrong = _expanded(trial, state, kept)
        if not wrong:
            state.analyses = trial
            state.rebase()
            return len(trial.program.cache.recipes)
        refused |= wrong
        trial = PassState.begin(state.request, state.captured, {}, state.base).analyses
        canonicalize(trial)


def _expanded(trial: Analyses, state: PassState, kept: KeptRows) -> set[str]:
    """Return the attentions that would have to expand their kept rows."""
    # Slices of rows must not be sources in this check. If there are no such slices, the final verdicts are checked
    # first. They are needed anyway, and may already show that no attention expands rows.
    if trial.get(sliced_maps) is trial.get(site_maps) and not kept.expanded(trial.get(state.request.judgement)):
        return set()
    return kept.expanded(trial.get(_LEGAL))


def _keep(known: Analyses, state: PassState, refused: set[str]) -> KeptRows:
    def analysed() -> Maps:
        return Analyses(known.program).get(linear_maps)

    assume, packs = state.request.own_cache, state.options.cache_dtype == "fp8"
    found, maps = known.get(sites), known.get(site_maps)
    return keep_rows(known.program, found, maps, refused, analysed, assume=assume, packs=packs)


def analyse(state: PassState) -> int:
    """Find the attentions and compute their linear maps."""
    state.analyses.get(sliced_maps)
    return len(state.analyses.get(sites))


def judge(state: PassState) -> int:
    """Compute the verdict on each attention."""
    state.verdicts = list(state.analyses.get(state.request.judgement))
    return len(state.verdicts)


def split_heads(state: PassState) -> int:
    """Split attentions whose heads are computed differently, if a trial on a copy shows a gain."""
    candidates = set(_groups(state.analyses, (v for v in state.verdicts if v.site.node.name not in state.failed)))
    told: dict[str, Unsplit] = {}
    while candidates:
        # Each round needs a fresh copy, because the last trial's graph contains the splits of that trial.
        trial = Analyses(state.program.copy())
        whole = {v.site.node.name: v for v in trial.get(state.request.judgement)}
        groups = _groups(trial, (v for name, v in whole.items() if name in candidates))
        splits = split(groups.values(), trial.program.fake_mode)
        remove_dead_code(trial.program.gm.graph)
        trial.invalidate()
        verdicts = trial.get(state.request.judgement)
        by_node = {v.site.node: v for v in verdicts}
        useless = {s.name: unsplit(s, by_node) for s in splits if not gains(s, whole[s.name], by_node)}
        if not useless:
            state.analyses, state.verdicts, state.splits = trial, list(verdicts), splits
            break
        told.update(useless)
        candidates -= useless.keys()
    state.verdicts = [told.get(v.site.node.name, Unsplit()).told(v) for v in state.verdicts]
    return len(state.splits)


def _groups(known: Analyses, verdicts: Iterable[Verdict]) -> dict[str, HeadGroups]:
    found = {v.site.node.name: groups_of(v, known.get(sliced_maps)) for v in verdicts}
    return {name: groups for name, groups in found.items() if groups is not None}


def unfollowed(state: PassState) -> int:
    """Record nodes that look like an attention but could not be analysed."""
    state.lost = state.analyses.get(lost)
    return len(state.lost)
