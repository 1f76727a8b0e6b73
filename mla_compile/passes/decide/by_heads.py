"""Decide which large expanded attentions are computed for a few heads at a time, and in which groups."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.region import Region, find_region
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.sizes import hint, same, size
from mla_compile.passes.ir.stop import Stop

MOST_GROUPS = 16
"""The maximum number of groups. A sixteenth of an attention's per-head tensors is then in memory at a time.

More groups would save little and add code, because the merged output and the hidden states have no heads.
"""


def is_large(site: AttentionSite, limit: int, *, guard: bool) -> bool:
    """Whether the per-head tensors of an attention take more than ``limit`` bytes, in a call of more than one query.

    False if sizes are known only at run time. If sizes are symbolic, ``guard`` adds a guard to the graph, so that the
    answer holds for all calls. If ``guard`` is false, the answer holds for the hinted sizes.
    """
    if same(axis_size(site.queries), 1):
        return False
    total = _bytes(site)
    if free_unbacked_symbols(total):
        return False
    return bool(total > limit) if guard else hint(size(total), total) > limit


def bytes_of(site: AttentionSite) -> int:
    """Return the bytes of the per-head tensors of an attention, for the hinted sizes."""
    total = _bytes(site)
    return hint(size(total), total)


def groups_along_heads(site: AttentionSite, weights: Collection[fx.Node]) -> tuple[Region, tuple[int, ...]] | Stop:
    """Return the region along an attention's heads and the bounds of groups, or the reason why there are no groups."""
    stop = Stop(site.node, "unsupported_op", "it has no axis of heads of a known length")
    # Heads are the innermost axis that queries, keys and output share. The axes before it are batch axes.
    for dim, axis in reversed(list(enumerate(site.out.axes))):
        heads = shape(site.node)[dim]
        if not axis or not set(axis) <= set(site.lead) or not isinstance(heads, int) or heads == 1:
            continue
        region = find_region(site.node, dim, weights)
        if isinstance(region, Stop):
            return region
        made = _made(site)
        left = [n for n in made if n not in region.inside]
        if 2 * sum(map(_node_bytes, left)) > sum(map(_node_bytes, made)):
            return Stop(left[0], "unsupported_op", "its results are needed for all heads, or computed from all")
        bounds = region.bounds(MOST_GROUPS)
        if bounds is None:
            return Stop(site.node, "unsupported_op", "its heads cannot be divided into groups that all tensors share")
        return region, bounds
    return stop


def _made(site: AttentionSite) -> dict[fx.Node, None]:
    """Return the tensors that an attention computes per head: queries, keys, values, output, written intermediates."""
    products = [n for p in site.products for n in (p.q.node, p.k.node, p.node) if n is not None]
    probabilities = [] if site.probs is None else [site.probs.node]
    return dict.fromkeys([*products, *probabilities, site.v.node, site.node])


def _bytes(site: AttentionSite) -> int | torch.SymInt:
    tensors = sum((_sized(node) for node in _made(site)), start=0)
    if site.probs is not None or not _writes_scores_out(site):
        return tensors
    (product,) = site.products
    q, k = val(product.q.node), val(product.k.node)
    # Add scores and probabilities, which torch computes in float32 or wider.
    return tensors + 2 * math.prod((*q.shape[:-1], k.shape[-2])) * max(4, q.element_size())


def _writes_scores_out(site: AttentionSite) -> bool:
    """Whether scores are written to memory.

    torch's fused CPU attention writes no scores, but needs K and V of equal width.
    """
    k, v = (val(n) for n in (site.products[0].k.node, site.v.node))
    return k.device.type == "cpu" and not same(size(k.shape[-1]), size(v.shape[-1]))


def _sized(node: fx.Node) -> int | torch.SymInt:
    return val(node).numel() * val(node).element_size()


def _node_bytes(node: fx.Node) -> int:
    total = _sized(node)
    return hint(size(total), total)
