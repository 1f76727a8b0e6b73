"""The pass that computes large expanded attentions for a few heads at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mla_compile.codes import CODES, Code
from mla_compile.errors import VerificationError
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.by_heads import bytes_of, groups_along_heads, is_large
from mla_compile.passes.ir.graph import operator_name
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.rewrite.by_heads import by_heads as in_groups
from mla_compile.passes.verify.comparison import Check, Checks, Comparison
from mla_compile.passes.verify.others import by_heads_comparison
from mla_compile.pipeline.analyses import canonicalize, copy_with_origins, device_type, sites, weights
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState

_IN_GROUPS = "{size} of {heads} heads at a time, since all at once would take {gib:.3g} GiB for this attention"
_AT_ONCE = "all heads at once, which take {gib:.3g} GiB for this attention: {why}"


def by_heads(state: PassState) -> int:
    """Group the heads of large attentions, in the program and in its expanded variant."""
    limit = state.options.expanded_bytes
    if limit is None:
        return 0
    # Only expanded latent attentions are grouped: other models keep their graphs, and get no extra guard.
    kept = {
        v.site.node.name
        for v in state.verdicts
        if CODES[v.code].verdict == "kept" and v.code is not Code.ALREADY_ABSORBED
    }
    done = _Grouping(state, state.analyses, limit)
    if kept:
        done.run(kept)
    state.by_heads, state.head_notes = done.done, done.notes
    if any(v.by_call and is_large(v.site, limit, guard=state.request.recompiles) for v in state.chosen):
        other = _Grouping(state, expanded(state), limit)
        other.run(None)
        state.head_notes |= {name: f"where it is expanded, {note}" for name, note in other.notes.items()}
        if other.done:
            other.known.program.gm.recompile()
            state.expanded = other.known.program
    return state.by_heads


def expanded(state: PassState) -> Analyses:
    """Return the program of calls that do not absorb, as rewritten so far, or else a canonical copy of ``base``."""
    if state.expanded is not None:
        return Analyses(state.expanded)
    known = Analyses(copy_with_origins(state.base))
    canonicalize(known)
    settle(known.program.gm.graph)
    remove_dead_code(known.program.gm.graph)
    known.invalidate()
    return known


@dataclass
class _Grouping:
    """The work on one program: the number of rewritten attentions, and a note for each attention's node name."""

    state: PassState
    known: Analyses
    limit: int
    done: int = 0
    notes: dict[str, str] = field(default_factory=dict)

    def run(self, names: Collection[str] | None) -> None:
        """Rewrite the large attentions among ``names``; None means all.

        If ``options.strict``, a failed check raises an error.
        """
        checks = Checks(self.known.program.weights)
        for site in self.known.get(sites):
            asked = names is None or site.node.name in names
            if asked and is_large(site, self.limit, guard=self.state.request.recompiles):
                self.notes[site.node.name] = self._group(site, checks)
        remove_dead_code(self.known.program.gm.graph)

    def _group(self, site: AttentionSite, checks: Checks) -> str:
        options, program, untouched = self.state.options, self.known.program, self.state.untouched
        gib = bytes_of(site) / 2**30
        chosen = groups_along_heads(site, self.known.get(weights))
        if isinstance(chosen, Stop):
            return _AT_ONCE.format(gib=gib, why=f"{chosen.detail} ({operator_name(chosen.node)})")
        region, bounds = chosen
        in_order = options.codegen == "inductor" and options.lowering == "op"
        pad = device_type(program.gm) == "cpu"  # torch's fused CPU attention needs K and V of one width
        new = in_groups(region, bounds, program.fake_mode, in_order=in_order, pad=pad)
        note = _IN_GROUPS.format(size=bounds[1] * region.heads // bounds[-1], heads=region.heads, gib=gib)
        if untouched is not None:
            compared = by_heads_comparison(site, region, new, untouched, program.weights)
            check = checks.check(compared) if isinstance(compared, Comparison) else Check(None, note=compared)
            if check.problem is not None:
                if options.strict:
                    raise VerificationError(f"an attention by groups of heads {check.problem}; it was not used")
                return _AT_ONCE.format(gib=gib, why=f"in groups it {check.problem}")
            note += f" ({check.note})" if check.note else ""
        region.out.replace_all_uses_with(new)
        self.done += 1
        return note
