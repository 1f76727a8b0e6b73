"""Decides which large expanded attentions are computed for a few heads at a time, and rewrites them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.analysis import device_type, weights_of
from mla_compile.core.program import Program
from mla_compile.errors import VerificationError
from mla_compile.options import Options
from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.region import Region, find_region
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import operator_name, shape, val
from mla_compile.passes.ir.sizes import hint, same, size
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.rewrite.by_heads import by_heads
from mla_compile.passes.verify.by_heads import by_heads_comparison
from mla_compile.passes.verify.comparison import Check, Checks, Comparison

MOST_GROUPS = 16
"""The largest number of groups of an attention, so that a sixteenth of its per-head tensors is in memory at a time.

The merged output and the hidden states remain. They have no heads, so more groups would only add code.
"""

_IN_GROUPS = "{size} of {heads} heads at a time, since all at once would take {gib:.3g} GiB for this attention"
_AT_ONCE = "all heads at once, which take {gib:.3g} GiB for this attention: {why}"


@dataclass
class ByHeads:
    """The result for one program: how many attentions were rewritten, and a note on each by the name of its node."""

    done: int = 0
    notes: dict[str, str] = field(default_factory=dict)


def is_large(site: AttentionSite, limit: int, *, guard: bool) -> bool:
    """Whether the per-head tensors of an attention take more than ``limit`` bytes, in a call of more than one query.

    For symbolic sizes: with ``guard`` the answer becomes a guard of the graph, which is recompiled for sizes that
    violate it; without it the answer holds for the hinted sizes.
    """
    if same(axis_size(site.queries), 1):
        return False
    total = _bytes(site)
    if free_unbacked_symbols(total):
        return False
    return bool(total > limit) if guard else hint(size(total), total) > limit


def group_heads(
    program: Program,
    options: Options,
    untouched: fx.Graph | None,
    is_asked: Callable[[AttentionSite], bool],
    *,
    guard: bool,
) -> ByHeads:
    """Rewrite the large attentions of a canonical program for which ``is_asked`` returns true.

    ``untouched`` is the graph that they are verified against. Raises :class:`VerificationError` with
    ``options.strict``.
    """
    found, checks = ByHeads(), Checks(program.weights)
    before = {} if untouched is None else {n.name: n for n in untouched.nodes}
    assert options.expanded_bytes is not None
    weights = weights_of(program)
    in_order = options.codegen == "inductor" and options.lowering == "op"
    pad = device_type(program.gm) == "cpu"  # torch's fused CPU attention needs K and V of one width
    for site in find_attention(program.gm.graph, weights):
        if not is_asked(site) or not is_large(site, options.expanded_bytes, guard=guard):
            continue
        total = _bytes(site)
        gib = hint(size(total), total) / 2**30
        chosen = _region(site, weights)
        if isinstance(chosen, Stop):
            why = f"{chosen.detail} ({operator_name(chosen.node)})"
            found.notes[site.node.name] = _AT_ONCE.format(gib=gib, why=why)
            continue
        region, bounds = chosen
        new = by_heads(region, bounds, program.fake_mode, in_order=in_order, pad=pad)
        note = _IN_GROUPS.format(size=bounds[1] * region.heads // bounds[-1], heads=region.heads, gib=gib)
        if untouched is not None:
            compared = by_heads_comparison(site, region, new, before, program.weights)
            check = checks.check(compared) if isinstance(compared, Comparison) else Check(None, note=compared)
            if check.problem is not None:
                if options.strict:
                    raise VerificationError(f"an attention by groups of heads {check.problem}; it was not used")
                found.notes[site.node.name] = _AT_ONCE.format(gib=gib, why=f"in groups it {check.problem}")
                continue
            note += f" ({check.note})" if check.note else ""
        region.out.replace_all_uses_with(new)
        found.notes[site.node.name] = note
        found.done += 1
    remove_dead_code(program.gm.graph)
    return found


def _region(site: AttentionSite, weights: set[fx.Node]) -> tuple[Region, tuple[int, ...]] | Stop:
    """The region of an attention along its heads and the ends of its groups, or the stop that prevents grouping."""
    stop = Stop(site.node, "unsupported_op", "it has no axis of heads of a known length")
    # The innermost axis that queries, keys and output share: the axes before it are batch axes.
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
    """The tensors an attention computes for each head: queries, keys, values, output, written-out intermediates."""
    products = [n for p in site.products for n in (p.q.node, p.k.node, p.node) if n is not None]
    probabilities = [] if site.probs is None else [site.probs.node]
    return dict.fromkeys([*products, *probabilities, site.v.node, site.node])


def _bytes(site: AttentionSite) -> int | torch.SymInt:
    tensors = sum((_sized(node) for node in _made(site)), start=0)
    if site.probs is not None or not _writes_scores_out(site):
        return tensors
    (product,) = site.products
    q, k = val(product.q.node), val(product.k.node)
    # Scores and probabilities: torch computes them in float32 or wider.
    return tensors + 2 * math.prod((*q.shape[:-1], k.shape[-2])) * max(4, q.element_size())


def _writes_scores_out(site: AttentionSite) -> bool:
    """Whether scores reach memory: torch's fused CPU attention, which avoids that, needs K and V of one width."""
    k, v = (val(n) for n in (site.products[0].k.node, site.v.node))
    return k.device.type == "cpu" and not same(size(k.shape[-1]), size(v.shape[-1]))


def _sized(node: fx.Node) -> int | torch.SymInt:
    return val(node).numel() * val(node).element_size()


def _node_bytes(node: fx.Node) -> int:
    total = _sized(node)
    return hint(size(total), total)
