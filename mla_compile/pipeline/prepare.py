"""Passes that prepare a program: plain operators in place of a library's, one spelling, rows in place of K and V."""

from __future__ import annotations

from collections.abc import Callable

from mla_compile.passes.cache.keep import KeptRows, keep_rows
from mla_compile.passes.cost.cost import default_device
from mla_compile.passes.fused.read import add_plain_attention, has_fused
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.quantized.read import add_stand_ins, is_quantized
from mla_compile.pipeline.analyses import (
    CANONICAL,
    Judgement,
    canonicalize,
    linear_maps,
    site_maps,
    sites,
    sliced_maps,
    weights,
)
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState

_LEGAL = Judgement("absorbed", "never", device=default_device("cpu"), slices=False)
"""The question is whether absorbing is legal, not whether it is cheaper."""


def stand_ins(state: PassState) -> int:
    """Let plain operators stand in for those of libraries."""
    program, graph = state.program, state.graph
    fused, quantized, exact = has_fused(graph), is_quantized(graph), state.options.quantized == "exact"
    added = add_plain_attention(graph, program.fake_mode) if fused else 0
    if quantized:
        added += add_stand_ins(graph, state.analyses.get(weights), program.fake_mode, exact=exact)
    if added or fused or (quantized and exact):
        state.rebase()
    return added


def canonical(name: str) -> Callable[[PassState], int]:
    """A pass of :data:`~mla_compile.pipeline.analyses.CANONICAL`."""
    return lambda state: CANONICAL[name](state.analyses)


def latent_cache(state: PassState) -> int:
    """Replace the K and V that the caller keeps by their rows.

    This is done only for attentions that can then be absorbed: rows are kept to be read as they are, not to be expanded
    in every call. Caches of attentions for which that fails are left, in a fresh copy.
    """
    if state.options.cache != "latent":
        return 0
    refused: set[str] = set()
    trial = state.analyses
    while True:
        kept = _keep(trial, state, refused)
        if not kept.sides:
            # What was read of this copy holds for the passes that follow.
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
    """The attentions that would have to expand the rows that were kept for them."""
    # In most graphs the verdicts that decide answer this. Sources that are slices of rows do not count here.
    if trial.get(sliced_maps) is trial.get(site_maps) and not kept.expanded(trial.get(state.request.judgement)):
        return set()
    return kept.expanded(trial.get(_LEGAL))


def _keep(known: Analyses, state: PassState, refused: set[str]) -> KeptRows:
    def analysed() -> Maps:
        return Analyses(known.program).get(linear_maps)

    assume, packs = state.request.own_cache, state.options.cache_dtype == "fp8"
    found, maps = known.get(sites), known.get(site_maps)
    return keep_rows(known.program, found, maps, refused, analysed, assume=assume, packs=packs)
