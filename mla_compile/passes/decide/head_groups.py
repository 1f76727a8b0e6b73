"""Decide whether to split an attention into groups of heads. Heads that share rows stay together.

An attention that cannot be absorbed as a whole may have heads with different sources. Each head has a separate softmax,
so groups of heads can be computed separately. An attention is not split if its heads meet before the output: in a mix
of heads, in a softmax or norm over heads, or in probabilities that another node reads. A trial on a copy shows whether
the groups absorb more than the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from mla_compile.codes import CODES, Code
from mla_compile.passes.attention.flex import flex_of
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.parts import AxisParts, Made
from mla_compile.passes.dependence.steps import Blind
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.proof.proved import Proofs
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.sources.sources import cut

MOST = 8
"""The maximum number of groups per attention.

Each group needs its own kernel launches in each step. If there are more groups, nearly every head has its own rows, and
there is nothing to share.
"""


Unit = Literal["head", "group", "batch entry", "entry"]
"""The meaning of one position along an axis.

"head": one head. "group": heads that share rows, if heads have another axis. "batch entry": all heads of one batch
entry. "entry": unknown.
"""


@dataclass(frozen=True)
class HeadGroups:
    """Groups of heads of ``site``, with their ``bounds`` along axis ``dim`` of the site's output.

    ``unit``: the meaning of one position along this axis.
    """

    site: AttentionSite
    dim: int
    unit: Unit
    bounds: tuple[int, ...]
    parts: AxisParts
    core: dict[tuple[fx.Node, int], Blind]


@dataclass(frozen=True)
class Group:
    """The attention of the heads from ``start`` to ``stop``."""

    node: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class SplitSite:
    """A split attention: the ``name`` of its old output node, the old ``site``, and the new output ``joined``.

    ``unit``: the unit of ``groups``; see :class:`HeadGroups`.
    """

    name: str
    site: AttentionSite
    joined: fx.Node
    groups: tuple[Group, ...]
    unit: Unit

    @property
    def count(self) -> int:
        return self.groups[-1].stop


def head_groups(site: AttentionSite, maps: Maps) -> HeadGroups | None:
    """Return groups of neighbouring heads that share the rows of keys and values; None if there is only one group."""
    # The functions of flex_attention take the index of the head, which a split would change.
    if site.problem is not None or flex_of(site.node) is not None:
        return None
    products = {p.node or site.node for p in site.products}
    ends = {o.node for o in (*(p.q for p in site.products), *(m.operand for m in site.masks))}
    ends -= {o.node for o in (*(p.k for p in site.products), site.v)}
    parts = AxisParts(maps.weights, ends, lambda node: _made_of(node, maps))
    lead = [dim for dim, axis in enumerate(site.out.axes) if axis and set(axis) <= set(site.lead)]
    lead = [dim for dim in lead if isinstance(shape(site.node)[dim], int)]  # a batch of unknown length is not cut
    for dim in lead:
        core = parts.core(site.node, dim, products)
        # If other nodes read scores or probabilities, these must exist for all heads at once.
        if core is None or _leaves({node for node, _ in core}, site.node):
            continue
        runs = parts.runs(site.node, dim)
        if not 1 < len(runs) <= MOST or not any(_expanded(r.made) for r in runs):
            continue
        # If each head has its own latent, a split would only give one attention per head. Heads that share rows may
        # have another axis than the groups.
        shared = {d for d in lead if any(_expanded(r.made) and r.stop - r.start > 1 for r in parts.runs(site.node, d))}
        if shared:
            role = Proofs(site, maps).role_of(site.out.axes[dim])
            one: Unit = "group" if shared - {dim} else "head" if role == "heads" else "entry"
            unit = "batch entry" if role == "batch" else one
            return HeadGroups(site, dim, unit, tuple(r.stop for r in runs), parts, core)
    return None


def groups_of(verdict: Verdict, maps: Maps) -> HeadGroups | None:
    """Return the groups of heads of an attention that is not absorbed as a whole; None if groups would not help."""
    # Groups help only if the whole has no plan. A whole with a plan was kept because of its cost or an option.
    tried = verdict.parts if verdict.absorb else verdict.plan is None
    return head_groups(verdict.site, maps) if tried and verdict.code is not Code.FORMS_EXPANDED else None


def gains(split: SplitSite, whole: Verdict, verdicts: Mapping[fx.Node, Verdict]) -> bool:
    """Whether the groups absorb more than the whole."""
    if any(g.node not in verdicts for g in split.groups):
        return False
    groups = [verdicts[g.node] for g in split.groups]
    if not any(v.absorb for v in groups):
        return False
    # Each head must keep the sides that were absorbed without the split.
    before = _sides(whole)
    return not before or (all(before <= _sides(v) for v in groups) and any(before < _sides(v) for v in groups))


def _sides(verdict: Verdict) -> set[str]:
    if not verdict.absorb:
        return set()
    return {p.side for p in verdict.parts} or {"keys", "values"}


@dataclass(frozen=True)
class Unsplit:
    """What the report says about an attention if a split does not pay.

    ``kept``: if every group could legally be absorbed, the verdict that says why no group is absorbed.
    """

    notes: tuple[str, ...] = ()
    kept: Verdict | None = None

    def told(self, verdict: Verdict) -> Verdict:
        if self.kept is None or verdict.absorb:
            return replace(verdict, notes=(*verdict.notes, *self.notes))
        return replace(verdict, code=self.kept.code, reason=f"by groups of heads: {self.kept.reason}", blame=None)


def unsplit(split: SplitSite, verdicts: Mapping[fx.Node, Verdict]) -> Unsplit:
    """Return what could be absorbed in the groups of a split that does not pay."""
    found = [(g, verdicts[g.node]) for g in split.groups if g.node in verdicts]
    legal = [(g, v) for g, v in found if v.plan is not None and CODES[v.code].verdict == "kept"]
    notes = tuple(f"{heads_of(split, g)} alone could be absorbed; {v.reason}" for g, v in legal)
    return Unsplit(notes, legal[0][1] if len(legal) == len(split.groups) else None)


def heads_of(split: SplitSite, group: Group) -> str:
    last = group.stop - 1
    plural = split.unit.removesuffix("y") + ("ies" if split.unit.endswith("y") else "s")
    which = f"{split.unit} {last}" if group.start == last else f"{plural} {group.start}-{last}"
    return f"{which} of {split.count}"


def _made_of(node: fx.Node, maps: Maps) -> Made:
    """Return the rows that weights expand into ``node``. Anything else is represented by "itself"."""
    made: set[object] = set()
    for piece in maps.map(node).pieces:
        found = cut(piece, proper=True) if piece.source is not None else None
        made.add("itself" if found is None else found.node)
    return frozenset(made)


def _expanded(made: Made) -> bool:
    return any(what != "itself" for what in made)


def _leaves(inside: Collection[fx.Node], out: fx.Node) -> bool:
    """Whether a node between the products and the output is read outside of the attention."""
    return any(user not in inside for node in inside if node is not out for user in node.users)
