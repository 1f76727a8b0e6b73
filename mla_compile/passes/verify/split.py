"""Choose what to compare for an attention that was split by heads: all groups together with the original."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from mla_compile.passes.attention.visible import visible
from mla_compile.passes.decide.head_groups import SplitSite
from mla_compile.passes.ir.graph import ORIGIN, decides
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.verify.comparison import Comparison
from mla_compile.passes.verify.sites import compared, nearest_known


def split_comparison(
    split: SplitSite, groups: Sequence[Verdict], untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison:
    """Compare the joined output with the attention in the ``untouched`` graph, whose nodes are given by name."""
    boundary = {name: untouched[name] for name in _boundary(groups, weights)}
    plan, group = next((v.plan, g) for v, g in zip(groups, split.groups, strict=True) if v.absorb)
    assert plan is not None
    # The budget is computed from one group's plan, but the heads of all groups are computed.
    share = (group.stop - group.start) / split.heads
    return compared(plan, untouched[split.site.node.meta[ORIGIN]], split.joined, boundary, share=share)


def _boundary(groups: Sequence[Verdict], weights: Collection[str]) -> dict[str, fx.Node]:
    """Return nodes of both graphs from which all groups are computed.

    The absorbed rows are among these nodes; nodes between the rows and the attention are not.
    """
    rows: list[fx.Node] = []
    others: list[fx.Node] = []
    for verdict in groups:
        site = verdict.site
        others += [p.q.node for p in site.products]
        # The inputs of a mask are given instead of the mask, because one group may read a length in its place.
        others += (visible(site, ()) if verdict.plan is None else verdict.plan.visible).given
        if verdict.absorb and verdict.plan is not None:
            rows += [n for source in verdict.plan.sources for n in decides(source)]
        else:
            others += [*(p.k.node for p in site.products), site.v.node]
    found: dict[str, fx.Node] = {}
    for row in sorted(rows):  # one group may read rows that are computed from another group's rows
        found |= nearest_known([row], weights, set(found.values()))
    return found | nearest_known(others, weights, set(found.values()))
