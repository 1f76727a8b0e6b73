"""Split an attention whose heads come from different sources into one attention per group of heads.

Before: ``K = cat([K_a, K_b], heads); out = attention(q, K, V, mask)``

After: ``out = cat([attention(q[:a], K_a, V_a, mask), attention(q[a:], K_b, V_b, mask)], heads)``

The softmax runs over the keys of each head separately, so the attention of some heads does not need the others. Each
group is then found and judged like any attention: heads that are expanded from a latent are absorbed, others stay. An
attention is not split if its heads meet before the output: in a mix of heads, in a softmax or norm over heads, or in
probabilities that something else reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.flex import flex_of
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.sources import cut
from mla_compile.passes.dependence.parts import AxisParts, Made, PartMaker
from mla_compile.passes.dependence.steps import Blind, Joined
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import Builder, shape
from mla_compile.passes.linear.records import Maps

aten = torch.ops.aten

MOST = 8
"""The most groups of heads that one attention is split into.

Each group is an attention with kernel launches of its own in each step. If there are more groups than this, nearly
every head has rows of its own, and there is nothing to share.
"""


@dataclass(frozen=True)
class HeadGroups:
    """The bounds between groups of heads of ``site``; the heads are axis ``dim`` of its output."""

    site: AttentionSite
    dim: int
    bounds: tuple[int, ...]
    parts: AxisParts
    core: dict[tuple[fx.Node, int], Blind]


@dataclass(frozen=True)
class Group:
    """The attention of the heads from ``start`` to ``stop``."""

    node: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class SplitSite:
    """A split attention: ``name`` was its output node, ``site`` the original site, and ``joined`` is its new output."""

    name: str
    site: AttentionSite
    joined: fx.Node
    groups: tuple[Group, ...]

    @property
    def heads(self) -> int:
        return self.groups[-1].stop


def head_groups(site: AttentionSite, maps: Maps) -> HeadGroups | None:
    """Return groups of neighbouring heads that share the rows of keys and values; None if there is only one group."""
    # The functions of flex_attention take the index of the head.
    if site.problem is not None or flex_of(site.node) is not None:
        return None
    products = {p.node or site.node for p in site.products}
    ends = {o.node for o in (*(p.q for p in site.products), *(m.operand for m in site.masks))}
    ends -= {o.node for o in (*(p.k for p in site.products), site.v)}
    parts = AxisParts(maps.weights, ends, lambda node: _made_of(node, maps))
    for dim, axis in enumerate(site.out.axes):
        length = shape(site.node)[dim]
        if not axis or not set(axis) <= set(site.lead) or not isinstance(length, int):
            continue
        core = parts.core(site.node, dim, products)
        # If something else reads the scores or probabilities, they must exist for all heads at once.
        if core is None or _leaves({node for node, _ in core}, site.node):
            continue
        runs = parts.runs(site.node, dim)
        # If each head has a latent of its own, no rows are shared, and splitting gives one attention per head.
        if 1 < len(runs) <= MOST and any(_expanded(r.made) and r.stop - r.start > 1 for r in runs):
            return HeadGroups(site, dim, tuple(r.stop for r in runs), parts, core)
    return None


def split_heads(found: Iterable[HeadGroups], fake_mode: FakeTensorMode | None) -> list[SplitSite]:
    """Split each attention. Dead code removal deletes its old output, which is no longer read."""
    done: list[SplitSite] = []
    for groups in found:
        node, dim = groups.site.node, groups.dim
        _read_parts(groups.parts, fake_mode)
        maker = PartMaker(groups.parts, node, fake_mode, groups.core)
        bounds = (0, *groups.bounds)
        made = [Group(maker.make(node, dim, start, stop), start, stop) for start, stop in pairwise(bounds)]
        builder = Builder(node, fake_mode)
        joined = same_layout(builder, builder.call(aten.cat.default, [g.node for g in made], dim), node)
        node.replace_all_uses_with(joined)
        done.append(SplitSite(node.name, groups.site, joined, tuple(made)))
    return done


def _read_parts(parts: AxisParts, fake_mode: FakeTensorMode | None) -> None:
    """Build slices of joined heads from the selected heads alone, since the other heads may not be needed any more."""
    for node, dim in parts.visited():
        how = parts.step(node, dim)
        if node.target is not aten.slice.Tensor or not isinstance(how, Joined):
            continue
        (shown,) = how.parts
        if len(parts.runs(shown.node, shown.dim)) > 1:
            maker = PartMaker(parts, node, fake_mode, ())
            new = maker.make(shown.node, shown.dim, shown.offset, shown.offset + shown.stop)
            node.replace_all_uses_with(new)


def _made_of(node: fx.Node, maps: Maps) -> Made:
    """Return the rows that weights expand into ``node``; anything else counts as "itself"."""
    made: set[object] = set()
    for piece in maps.map(node).pieces:
        found = cut(piece, proper=True) if piece.source is not None else None
        made.add("itself" if found is None else found.node)
    return frozenset(made)


def _expanded(made: Made) -> bool:
    return any(what != "itself" for what in made)


def _leaves(inside: Collection[fx.Node], out: fx.Node) -> bool:
    """Whether something outside reads a node between the products and the output."""
    return any(user not in inside for node in inside if node is not out for user in node.users)
