"""Attention over rows that heads share, with no weight between, as one operator.

Nothing is left to absorb where rows are key and value as they are. But where the products are written out, the scores
and probabilities of every head go through memory, and the rows are read once for each product; the operator of absorbed
attention does neither. So a plan is made for such a site as for one that is absorbed, without a weight on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.codes import OVER_ROWS, Code
from mla_compile.passes.decide.by_hand import plan_by_hand
from mla_compile.passes.decide.call_sizes import call_sizes, keys_read
from mla_compile.passes.decide.memories import memories
from mla_compile.passes.decide.reads import reads
from mla_compile.passes.decide.records import AbsorbPlan, Fusion, Verdict
from mla_compile.passes.decide.refine import value_features
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.operators import Permute, Regroup, Slice, decode
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.linear.records import Maps

MOST_QUERIES = 8
"""More are a prompt, whose products are large."""
FEWER_KEYS = 2
"""In a prompt the operator has to read so many times fewer keys, as windows and lists say. A key takes it 1.4 times as
long as products with all keys take for each, and these have the scores of every head in memory."""
MOST_ROWS = 48
"""Query rows (queries times heads) on a CPU. With more of them the products take longer than the rows take to come, and
products of matrices are as fast as the operator (benchmarks/absorbed_by_hand.py)."""


def with_fusions(graph: fx.Graph, verdicts: Sequence[Verdict], maps: Maps, *, sparse: bool = True) -> list[Verdict]:
    """``verdicts``, in which attentions over shared rows say how they become the operator, if they do.

    ``sparse``: whether it may read the keys of a list only.
    """
    if all(v.code not in OVER_ROWS for v in verdicts):
        return list(verdicts)
    first = first_equals(graph)
    return [replace(v, fusion=_fusion(v, maps, first, sparse)) if v.code in OVER_ROWS else v for v in verdicts]


def _fusion(verdict: Verdict, maps: Maps, first: Mapping[fx.Node, fx.Node], sparse: bool) -> Fusion | None:
    """How an attention becomes the operator; None where it does not, or where that would gain nothing."""
    site = verdict.site
    if site.problem is not None:
        return None
    plan = plan_by_hand(site, maps)
    if plan is None or not plan.whole:
        return None
    # What is chosen is no reason to read less of what is absorbed by hand.
    lists = sparse and verdict.code is Code.SHARED_ROWS
    fusion = Fusion(_seen(plan, lists), memories=tuple(_seen(p, lists) for p in memories(plan, maps, first)))
    if not _gains(fusion):
        return None
    return fusion if plan.values is None else _of_the_same_rows(fusion, first)


def _seen(plan: AbsorbPlan, lists: bool) -> AbsorbPlan:
    return plan if lists else replace(plan, visible=plan.visible.dense)


def _gains(fusion: Fusion) -> bool:
    """Whether the operator is faster than the products that the model writes."""
    sizes, plan, heads = call_sizes(fusion.plan), fusion.plan, set(fusion.plan.heads)
    on_cpu = val(plan.latent.node).device.type == "cpu"
    if sizes.symbolic or sizes.S > MOST_QUERIES:
        read, there_are = map(sum, zip(*map(keys_read, fusion.each), strict=True))
        return on_cpu and FEWER_KEYS * read <= there_are
    chosen = any(one.visible.chosen is not None for one in fusion.each)
    copied = any(heads & set(flatten(p.k.axes)) for p in plan.site.products)  # rows that are written for each head
    return chosen or copied or not on_cpu or sizes.S * plan.dims.H <= MOST_ROWS


def _of_the_same_rows(fusion: Fusion, first: Mapping[fx.Node, fx.Node]) -> Fusion:
    """Whether the values are the first or the last columns of the only rows of the keys."""
    plan, site = fusion.plan, fusion.plan.site
    keys = [piece for product in site.products for piece in reads(product.k, product.features, first)]
    values = reads(site.v, value_features(site), first)
    if plan.rope is not None or len(keys) != 1 or len(values) != 1 or not values[0].within(keys):
        return fusion
    start, stop = values[0].start - keys[0].start, values[0].stop - keys[0].start
    assert plan.values is not None
    # The very node that both are views of, for equal ones beside it may be of nothing that the other reads.
    whole = next((n for n in _viewed(plan.latent.node) if n in _viewed(plan.values.node)), None)
    if whole is None or keys[0].stop - keys[0].start != plan.latent.size or (start > 0 and stop < plan.latent.size):
        return fusion
    return replace(fusion, columns=(start, stop), whole=whole)


def _viewed(node: fx.Node) -> list[fx.Node]:
    """``node``, what it is a view of, and so on."""
    found = [node]
    while isinstance(how := decode(found[-1]), (Slice, Regroup, Permute)):
        found.append(how.x)
    return found
