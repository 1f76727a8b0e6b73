"""Replace attention over shared rows by one operator if no weight lies between heads and rows.

If the rows themselves are key and value, nothing is left to absorb. But written-out products move the scores and
probabilities of every head through memory, and read the rows once per product. The operator of absorbed attention
avoids this. Such a site therefore gets the plan of an absorbed site, but without weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.codes import OVER_ROWS, Code
from mla_compile.passes.decide.by_hand import plan_by_hand
from mla_compile.passes.decide.call_sizes import call_sizes, keys_read
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.moves import Reorder, Slice
from mla_compile.passes.ir.operators import behind
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.proof.memories import memories
from mla_compile.passes.sources.reads import reads
from mla_compile.passes.sources.records import AbsorbPlan, Fusion, Verdict
from mla_compile.passes.sources.refine import value_features

MOST_QUERIES = 8
"""The maximum number of queries per call for which the operator may pay if it reads all keys.

In prompts, large products are faster.
"""
FEWER_KEYS = 2
"""In a prompt, windows and index lists must reduce the number of keys by at least this factor.

Per key, the operator takes 1.4 times as long as products over all keys. But the products hold the scores of every head
in memory.
"""
MOST_ROWS = 48
"""The maximum of queries times heads for which the operator pays on a CPU.

Above this number, arithmetic and not memory limits the speed, and matrix products are as fast as the operator
(benchmarks/absorbed_by_hand.py).
"""


def with_fusions(graph: fx.Graph, verdicts: Sequence[Verdict], maps: Maps, *, sparse: bool = True) -> list[Verdict]:
    """Return ``verdicts``, with a fusion for each attention over shared rows that the operator replaces.

    ``sparse``: whether the operator may read only the keys of an index list.
    """
    if all(v.code not in OVER_ROWS for v in verdicts):
        return list(verdicts)
    first = first_equals(graph)
    return [replace(v, fusion=_fusion(v, maps, first, sparse=sparse)) if v.code in OVER_ROWS else v for v in verdicts]


def _fusion(verdict: Verdict, maps: Maps, first: Mapping[fx.Node, fx.Node], *, sparse: bool) -> Fusion | None:
    """Return the fusion of an attention; None if the operator cannot replace it or would not be faster."""
    site = verdict.site
    if site.problem is not None:
        return None
    plan = plan_by_hand(site, maps)
    if plan is None or not plan.whole:
        return None
    # An attention that its author absorbed by hand keeps reading all keys, even if it has an index list.
    lists = sparse and verdict.code is Code.SHARED_ROWS
    fusion = Fusion(
        _seen(plan, lists=lists), memories=tuple(_seen(p, lists=lists) for p in memories(plan, maps, first))
    )
    if not _gains(fusion):
        return None
    return fusion if plan.values is None else _of_the_same_rows(fusion, first)


def _seen(plan: AbsorbPlan, *, lists: bool) -> AbsorbPlan:
    return plan if lists else replace(plan, visible=plan.visible.dense)


def _gains(fusion: Fusion) -> bool:
    """Whether the operator is faster than the products that the model writes."""
    sizes, plan, heads = call_sizes(fusion.plan), fusion.plan, set(fusion.plan.heads)
    on_cpu = val(plan.latent.node).device.type == "cpu"
    if sizes.symbolic or sizes.S > MOST_QUERIES:
        read, there_are = map(sum, zip(*map(keys_read, fusion.each), strict=True))
        return on_cpu and FEWER_KEYS * read <= there_are
    chosen = any(one.visible.chosen is not None for one in fusion.each)
    copied = any(heads & set(flatten(p.k.axes)) for p in plan.site.products)  # rows that are copied for each head
    return chosen or copied or not on_cpu or sizes.S * plan.dims.H <= MOST_ROWS


def _of_the_same_rows(fusion: Fusion, first: Mapping[fx.Node, fx.Node]) -> Fusion:
    """Record the values' columns if these are the first or last columns of the keys' rows."""
    plan, site = fusion.plan, fusion.plan.site
    keys = [piece for product in site.products for piece in reads(product.k, product.features, first)]
    values = reads(site.v, value_features(site), first)
    if plan.rope is not None or len(keys) != 1 or len(values) != 1 or not values[0].within(keys):
        return fusion
    start, stop = values[0].start - keys[0].start, values[0].stop - keys[0].start
    assert plan.values is not None
    # Keys and values must be views of one node. Two equal nodes do not suffice: their equal inputs may differ as nodes.
    views = behind(plan.values.node, (Slice, Reorder))
    whole = next((n for n in behind(plan.latent.node, (Slice, Reorder)) if n in views), None)
    if whole is None or keys[0].stop - keys[0].start != plan.latent.size or (start > 0 and stop < plan.latent.size):
        return fusion
    return replace(fusion, columns=(start, stop), whole=whole)
