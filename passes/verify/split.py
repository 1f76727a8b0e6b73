"""What is compared to check an attention that was split by heads: all of its groups together and what it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from mla_compile.passes.attention.visible import visible
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.graph import ORIGIN, decides
from mla_compile.passes.rewrite.split_heads import SplitSite
from mla_compile.passes.verify.comparison import Comparison
from mla_compile.passes.verify.sites import compared, nearest_known


def split_comparison(
    split: SplitSite, groups: Sequence[Verdict], untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison:
    """The joined output beside the attention in the ``untouched`` graph, whose nodes these are by name."""
    boundary = {name: untouched[name] for name in _boundary(groups, weights)}
    plan, group = next((v.plan, g) for v, g in zip(groups, split.groups, strict=True) if v.absorb)
    assert plan is not None
    # The budget is reckoned from one group's plan, but the heads of all groups are computed.
    share = (group.stop - group.start) / split.heads
    return compared(plan, untouched[split.site.node.meta[ORIGIN]], split.joined, boundary, share=share)


def _boundary(groups: Sequence[Verdict], weights: Collection[str]) -> dict[str, fx.Node]:
    """Nodes of both graphs from which all groups are computed.

    The rows that are absorbed are among them, and nothing between them and the attention is.
    """
    rows: list[fx.Node] = []
    others: list[fx.Node] = []
    for verdict in groups:
        site = verdict.site
        others += [p.q.node for p in site.products]
        # Of all groups what decides a mask is given, and not the mask: one group may be told a length in its place.
        others += (visible(site, ()) if verdict.plan is None else verdict.plan.visible).given
        if verdict.absorb and verdict.plan is not None:
            rows += [n for source in verdict.plan.sources for n in decides(source)]
        else:
            others += [*(p.k.node for p in site.products), site.v.node]
    found: dict[str, fx.Node] = {}
    for row in sorted(rows):  # one group may read rows as another makes them
        found |= nearest_known([row], weights, set(found.values()))
    return found | nearest_known(others, weights, set(found.values()))
