"""A numeric check of an attention that is computed by groups of heads against the untouched graph."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.region import Region
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import ORIGIN, is_tensor, shape, val
from mla_compile.passes.verify.check import BUDGET_BYTES, Check, compare_values, nearest_known, renamed
from mla_compile.passes.verify.evaluate import number, symbols


def region_key(region: Region, bounds: tuple[int, ...]) -> tuple[object, ...]:
    """Regions with equal keys are the same computation on other tensors; one of them is checked."""
    nodes = sorted(region.inside)
    places: dict[fx.Node, int] = {}

    def place(node: fx.Node) -> int:
        return places.setdefault(node, len(places))

    calls = tuple((str(n.target), repr(fx.map_arg((n.args, n.kwargs), _plain)), shape(n)) for n in nodes)
    read = tuple(place(n) for node in nodes for n in node.all_input_nodes)
    given = tuple((val(n).dtype, shape(n)) for n in places if is_tensor(n))
    return renamed((region.dim, bounds, calls, read, given), symbols([*nodes, *region.whole]))


def _plain(node: fx.Node) -> fx.node.Argument:
    return None


def check_by_heads(
    site: AttentionSite,
    region: Region,
    new: fx.Node,
    original: fx.Graph,
    weights: Mapping[str, torch.Tensor | None],
) -> Check:
    """Compares ``new`` with what the region's output is in ``original``, at the sizes of the trace."""
    before = {n.name: n for n in original.nodes}
    if region.out.meta.get(ORIGIN) not in before:
        return Check(None, note="not checked numerically: the untouched graph has no such output")
    boundary = {name: before[name] for name in nearest_known(region.whole, weights)}
    sizes = symbols([*boundary.values(), *region.whole, *region.inside])
    scores = number(axis_size((*site.lead, *site.queries, *site.keys)), sizes)
    tensors = max(math.prod(number(n, sizes) for n in shape(node)) for node in region.inside)
    # Eight bytes a value in float64, and room for four tensors of that size.
    if 32 * max(scores, tensors) > BUDGET_BYTES:
        return Check(None, note="groups of heads not checked numerically: too many tokens for a float64 run")
    return compare_values(before[region.out.meta[ORIGIN]], new, boundary, weights, sizes)
