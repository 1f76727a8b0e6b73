"""Find groups of heads with separate latents, if the groups have an axis of their own.

In ``k = einsum("btgl,glhn->bghtn", c, W)``, each group has its own rows and weight. If queries, keys and output also
have the group axis, this axis acts as a batch axis: ``q_g (c_g W_g) = (q_g W_g^T) c_g`` within each group. A walk ends
at any other weight that differs along an axis of the rows. For example, a weight that differs along the tokens is a
table of positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.graph import packet, shape
from mla_compile.passes.ir.operators import decode, is_contraction
from mla_compile.passes.ir.walk import REACH, reachable
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.sources.records import pieces_of
from mla_compile.passes.sources.sources import choose_sources

aten = torch.ops.aten

_KEEP = (aten.add, aten.sub, aten.mul, aten.div)
"""Operators that may follow a product with one weight per group. Their weights may also differ per group."""


def with_groups(sites: Sequence[AttentionSite], maps: Maps) -> Maps:
    """Return linear maps whose walks from K and V of ``sites`` continue past products with one weight per group."""
    for site in sites:
        operands = [*(p.k for p in site.products), site.v]
        for node in _ends(operands, maps):
            trial = maps.with_virtual(replace(maps.virtual, grouped=maps.virtual.grouped | {node}))
            if all(_blind(site, o, node, trial) for o in operands):
                maps = trial
    return maps


def _ends(operands: Sequence[Operand], maps: Maps) -> list[fx.Node]:
    """Return the products at which walks end because a weight differs along an axis of the rows."""
    found: dict[fx.Node, None] = {}
    pieces = pieces_of([maps.map(o.node) for o in operands])
    # If all groups share one weight, a walk past this weight sees the groups as columns. So walks that end at the
    # chosen sources are searched, too.
    batched = any(_is_batched(v.node, maps) for p in pieces for v in p.path)
    for at in (maps, maps.with_sources(choose_sources(pieces)[0])) if batched else (maps,):

        def behind(node: fx.Node, at: Maps = at) -> list[fx.Node]:
            ends = {p.source for p in at.map(node).pieces if p.source is not None} & at.reasons.keys()
            stops = [at.reasons[end] for end in ends]
            found.update((s.node, None) for s in stops if s.code == "head_dependent_latent" and is_contraction(s.node))
            # Walks also end at sums with such a product, at per-group factors, and at slices of such tensors. The
            # search continues upstream of these nodes.
            further = (s.node for s in stops if decode(s.node) is not None or packet(s.node) in _KEEP)
            return [n for stopped in further for n in at.operands(stopped)]

        deque(reachable((o.node for o in operands), behind, REACH), maxlen=0)
    return sorted(found)


def _is_batched(node: fx.Node, maps: Maps) -> bool:
    """Whether ``node`` is a product with a weight of more than two axes, such as one matrix per group."""
    return is_contraction(node) and any(maps.is_weight(n) and len(shape(n)) > 2 for n in node.all_input_nodes)


def _blind(site: AttentionSite, operand: Operand, node: fx.Node, maps: Maps) -> bool:
    """Whether every weight upstream of ``operand`` is the same for all keys if the walk continues past ``node``."""
    cuts, _ = choose_sources(pieces_of([maps.map(operand.node)]))
    for at in (maps, maps.with_sources(cuts - {node})):
        for piece in at.map(operand.node).pieces:
            factors = {a for f in (piece.weight, piece.bias) if f is not None for a in f.atoms}
            dims = zip(operand.axes, piece.axes, strict=True)
            if any(factors & set(own) for axis, own in dims if set(axis) & set(site.keys)):
                return False
    return True
