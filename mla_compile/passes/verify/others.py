"""Choose the nodes to compare for the rewrites that are not absorptions.

There are three such rewrites. An indexer becomes one operator. An attention runs one group of heads at a time to save
memory. An attention is split because its heads read different rows. In all functions, ``untouched`` maps names to the
nodes of the untouched graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from mla_compile.passes.attention.indexer import Indexer
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.attention.visible import visible
from mla_compile.passes.decide.head_groups import SplitSite
from mla_compile.passes.dependence.region import Region
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import ORIGIN, decides, shape
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.verify.comparison import BUDGET_BYTES, LONG, Comparison, Run
from mla_compile.passes.verify.evaluate import number, symbols
from mla_compile.passes.verify.sites import compared, nearest_known


def index_comparison(
    found: Indexer, new: fx.Node, untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison:
    """Return a comparison of ``new`` with the untouched scores, at the traced sizes and at a longer context."""
    operands = (found.query, found.keys, found.weights)
    boundary = {name: untouched[name] for name in nearest_known([o.node for o in operands], weights)}
    seen = symbols([*boundary.values(), *(o.node for o in operands), found.out.node])
    contexts = [seen]
    free = [s for a in found.tokens if not isinstance(a.size, int) for s in a.size.free_symbols]
    if len(free) == 1:
        contexts.append({**seen, free[0]: LONG})
    products = (*found.batch, *found.queries, *found.heads, *found.tokens)
    # A float64 value takes eight bytes; four tensors of this size are budgeted.
    fits = [sizes for sizes in contexts if 32 * number(axis_size(products), sizes) <= BUDGET_BYTES]
    note = None if len(fits) == len(contexts) else "not checked numerically: the context is too long"
    return Comparison(untouched[found.out.node.meta[ORIGIN]], new, boundary, [Run(sizes) for sizes in fits], note)


def by_heads_comparison(
    site: AttentionSite, region: Region, new: fx.Node, untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison | str:
    """Return a comparison of ``new`` with the region's untouched output at the traced sizes, or say why not."""
    old = untouched.get(region.out.meta.get(ORIGIN, ""))
    if old is None:
        return "not checked numerically: the untouched graph has no such output"
    boundary = {name: untouched[name] for name in nearest_known(region.whole, weights)}
    sizes = symbols([*boundary.values(), *region.whole, *region.inside])
    scores = number(axis_size((*site.lead, *site.queries, *site.keys)), sizes)
    tensors = max(math.prod(number(n, sizes) for n in shape(node)) for node in region.inside)
    # A float64 value takes eight bytes; four tensors of this size are budgeted.
    if 32 * max(scores, tensors) > BUDGET_BYTES:
        return "groups of heads not checked numerically: too many tokens for a float64 run"
    return Comparison(old, new, boundary, [Run(sizes)])


def split_comparison(
    split: SplitSite, groups: Sequence[Verdict], untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison:
    """Return a comparison of the joined output of all groups with the attention in the ``untouched`` graph."""
    boundary = {name: untouched[name] for name in _boundary(groups, weights)}
    plan, group = next((v.plan, g) for v, g in zip(groups, split.groups, strict=True) if v.absorb)
    assert plan is not None
    # The budget is computed from one group's plan, but the heads of all groups are computed.
    share = (group.stop - group.start) / split.count
    return compared(plan, untouched[split.site.node.meta[ORIGIN]], split.joined, boundary, share=share)


def _boundary(groups: Sequence[Verdict], weights: Collection[str]) -> dict[str, fx.Node]:
    """Return the nodes from which all groups are computed, by their names in the untouched graph.

    The absorbed rows are included. Nodes between the absorbed rows and the attention are not.
    """
    rows: list[fx.Node] = []
    others: list[fx.Node] = []
    for verdict in groups:
        site = verdict.site
        others += [p.q.node for p in site.products]
        # Values are drawn for the inputs of a mask, not for the mask. A group may read a length instead of the mask.
        others += (visible(site, ()) if verdict.plan is None else verdict.plan.visible).given
        if verdict.absorb and verdict.plan is not None:
            rows += [n for source in verdict.plan.sources for n in decides(source)]
        else:
            others += [*(p.k.node for p in site.products), site.v.node]
    found: dict[str, fx.Node] = {}
    for row in sorted(rows):  # in graph order, because a group may read rows computed from another group's rows
        found |= nearest_known([row], weights, set(found.values()))
    return found | nearest_known(others, weights, set(found.values()))
