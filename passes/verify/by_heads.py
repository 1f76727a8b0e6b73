"""What is compared to check an attention that is computed by groups of heads."""

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
    """``new`` beside the region's output in the ``untouched`` graph, at the sizes of the trace; or why not.

    ``untouched``: the nodes of that graph by name.
    """
    old = untouched.get(region.out.meta.get(ORIGIN, ""))
    if old is None:
        return "not checked numerically: the untouched graph has no such output"
    boundary = {name: untouched[name] for name in nearest_known(region.whole, weights)}
    sizes = symbols([*boundary.values(), *region.whole, *region.inside])
    scores = number(axis_size((*site.lead, *site.queries, *site.keys)), sizes)
    tensors = max(math.prod(number(n, sizes) for n in shape(node)) for node in region.inside)
    # Eight bytes a value in float64, and room for four tensors of that size.
    if 32 * max(scores, tensors) > BUDGET_BYTES:
        return "groups of heads not checked numerically: too many tokens for a float64 run"
    return Comparison(old, new, boundary, [Run(sizes)])
