"""How many values a cache holds for each token of one attention, before the rewrite and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mla_compile.passes.cache.rewrite import LatentCache
from mla_compile.passes.ir.graph import BESIDE
from mla_compile.passes.sources.cached import pasts_of
from mla_compile.passes.sources.records import AbsorbPlan


class HeldValues(NamedTuple):
    """Values per token of one attention: in the model's own cache, and in the cache after the rewrite."""

    before: int
    after: int


def held(plans: Sequence[AbsorbPlan], cache: LatentCache | None) -> HeldValues | None:
    """Return the values per token of an attention's cache; None if the graph shows no cache for some rows.

    ``plans``: the plan of the attention, or the plans of its groups of heads.

    Most models cache rows themselves, so both numbers are equal. If the model cached K and V of each head, ``cache``
    tells which inputs are rows now, and how many values per token the replaced tensors had. If K and V stay in
    the cache, the number after the rewrite includes rows, K and V.
    """
    every = {rows.node: rows for plan in plans for rows in plan.rows}
    pasts = [pasts_of(node) for node in every]
    if not all(pasts):
        return None
    whole = plans[0].row_values if len(plans) == 1 else None
    after = sum(rows.size * rows.count for rows in every.values()) if whole is None else whole
    names = {node.name for nodes in pasts for node in nodes}
    inputs = {} if cache is None else cache.inputs
    replaced = [cache.recipes[name][0] for name, rows in inputs.items() if cache is not None and names & set(rows)]
    before = sum(recipe.values for recipe in replaced) if replaced else after
    beside = any(BESIDE in node.meta for nodes in pasts for node in nodes)
    return HeldValues(before, before + after if beside else after)
