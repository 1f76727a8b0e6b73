"""Choose what to compare for an attention that is computed by groups of heads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.region import Region
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import ORIGIN, shape
from mla_compile.passes.verify.comparison import BUDGET_BYTES, Comparison, Run
from mla_compile.passes.verify.evaluate import number, symbols
from mla_compile.passes.verify.sites import nearest_known


def by_heads_comparison(
    site: AttentionSite, region: Region, new: fx.Node, untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison | str:
    """Compare ``new`` with the region's output in the ``untouched`` graph at the traced sizes, or tell why not.

    ``untouched``: the nodes of that graph by name.
    """
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
