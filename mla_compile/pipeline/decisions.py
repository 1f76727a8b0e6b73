"""Passes that decide: the verdicts, and attentions that are split by heads on a copy."""

from __future__ import annotations

from collections.abc import Iterable

from mla_compile.passes.decide.head_groups import HeadGroups, Unsplit, gains, groups_of, unsplit
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.rewrite.split_heads import split_heads as split
from mla_compile.passes.sources.records import Verdict
from mla_compile.pipeline.analyses import lost, sites, sliced_maps
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState


def analyse(state: PassState) -> int:
    """Find the attentions and compute their linear maps."""
    state.analyses.get(sliced_maps)
    return len(state.analyses.get(sites))


def judge(state: PassState) -> int:
    """Ask for the verdict on each attention."""
    state.verdicts = list(state.analyses.get(state.request.judgement))
    return len(state.verdicts)


def split_heads(state: PassState) -> int:
    """Split attentions whose heads are computed differently, on a copy, as long as that absorbs more of each."""
    candidates = set(_groups(state.analyses, (v for v in state.verdicts if v.site.node.name not in state.failed)))
    told: dict[str, Unsplit] = {}
    while candidates:
        # Each round needs a fresh copy: the last trial's graph contains its splits.
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
    """Note what looks like an attention but could not be analysed."""
    state.lost = state.analyses.get(lost)
    return len(state.lost)
