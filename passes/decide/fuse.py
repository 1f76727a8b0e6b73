"""Attention over rows that heads share, with no weight between, as one operator.

Nothing is left to absorb where rows are key and value as they are. But where the products are written out, the scores
and probabilities of every head go through memory, and the rows are read once for each product; the operator of absorbed
attention does neither. So a plan is made for such a site as for one that is absorbed, without a weight on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.codes import OVER_ROWS
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.by_hand import heads_among_queries, reads
from mla_compile.passes.decide.call_sizes import call_sizes
from mla_compile.passes.decide.plan import make_plan
from mla_compile.passes.decide.records import AbsorbPlan, Fusion, Verdict, repeats
from mla_compile.passes.decide.refine import value_features
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.operators import Permute, Regroup, Slice, decode
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.linear.records import Maps

MOST_QUERIES = 8
"""More are a prompt, whose products are large: what is fastest for those is not asked here."""
MOST_ROWS = 48
"""Query rows (queries times heads) on a CPU. With more of them the products take longer than the rows take to come, and
products of matrices are as fast as the operator (benchmarks/absorbed_by_hand.py)."""


def with_fusions(graph: fx.Graph, verdicts: Sequence[Verdict], maps: Maps) -> list[Verdict]:
    """``verdicts``, in which attentions over shared rows say how they become one operator, if they do."""
    if all(v.code not in OVER_ROWS for v in verdicts):
        return list(verdicts)
    first = first_equals(graph)
    return [replace(v, fusion=_fusion(v.site, maps, first)) if v.code in OVER_ROWS else v for v in verdicts]


def _fusion(site: AttentionSite, maps: Maps, first: Mapping[fx.Node, fx.Node]) -> Fusion | None:
    """How ``site`` becomes one operator; None where it does not, or where that would gain nothing."""
    if site.problem is not None:
        return None
    heads = [] if site.causal else heads_among_queries(site, maps)
    operands = (*(p.k for p in site.products), site.v)
    shared = [a for a in (*site.lead, *heads) if all(repeats(o, a, maps) for o in operands)]
    if not all(isinstance(a.size, int) for a in shared):  # tokens that the code writes as it writes heads
        return None
    queries = tuple(a for a in site.queries if a not in heads)
    plan = make_plan(replace(site, lead=(*site.lead, *heads), queries=queries), maps, by_hand=True)
    if not isinstance(plan, AbsorbPlan) or not plan.whole:
        return None
    plan = replace(plan, visible=plan.visible.dense)
    sizes = call_sizes(plan)
    if sizes.symbolic or sizes.S > MOST_QUERIES:
        return None
    if val(plan.latent.node).device.type == "cpu" and sizes.S * plan.dims.H > MOST_ROWS:
        return None
    return Fusion(plan) if plan.values is None else _of_the_same_rows(plan, first)


def _of_the_same_rows(plan: AbsorbPlan, first: Mapping[fx.Node, fx.Node]) -> Fusion:
    """Whether the values are the first or the last columns of the only rows of the keys."""
    site = plan.site
    keys = [piece for product in site.products for piece in reads(product.k, product.features, first)]
    values = reads(site.v, value_features(site), first)
    if plan.rope is not None or len(keys) != 1 or len(values) != 1 or not values[0].within(keys):
        return Fusion(plan)
    start, stop = values[0].start - keys[0].start, values[0].stop - keys[0].start
    assert plan.values is not None
    # The very node that both are views of, for equal ones beside it may be of nothing that the other reads.
    whole = next((n for n in _viewed(plan.latent.node) if n in _viewed(plan.values.node)), None)
    if whole is None or keys[0].stop - keys[0].start != plan.latent.size or (start > 0 and stop < plan.latent.size):
        return Fusion(plan)
    return Fusion(plan, (start, stop), whole)


def _viewed(node: fx.Node) -> list[fx.Node]:
    """``node``, what it is a view of, and so on."""
    found = [node]
    while isinstance(how := decode(found[-1]), (Slice, Regroup, Permute)):
        found.append(how.x)
    return found
