"""Split an attention whose heads come from different sources into one attention per group of heads.

Before: ``K = cat([K_a, K_b], heads); out = attention(q, K, V, mask)``

After: ``out = cat([attention(q[:a], K_a, V_a, mask), attention(q[a:], K_b, V_b, mask)], heads)``

Each group then gets a verdict like any other attention. If a latent makes all heads of a group, the group is absorbed.
:mod:`mla_compile.passes.decide.head_groups` decides which attentions are split, and where.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.decide.head_groups import Group, HeadGroups, SplitSite
from mla_compile.passes.dependence.parts import AxisParts, PartMaker
from mla_compile.passes.dependence.steps import Joined
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import Builder

aten = torch.ops.aten


def split_heads(found: Iterable[HeadGroups], fake_mode: FakeTensorMode | None) -> list[SplitSite]:
    """Split each attention. The old outputs are no longer read, and dead code removal deletes them."""
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
        done.append(SplitSite(node.name, groups.site, joined, tuple(made), groups.unit))
    return done


def _read_parts(parts: AxisParts, fake_mode: FakeTensorMode | None) -> None:
    """Build slices of joined heads from only the selected heads, so that unread heads become dead code."""
    for node, dim in parts.visited():
        how = parts.step(node, dim)
        if node.target is not aten.slice.Tensor or not isinstance(how, Joined):
            continue
        (shown,) = how.parts
        if len(parts.runs(shown.node, shown.dim)) > 1:
            maker = PartMaker(parts, node, fake_mode, ())
            new = maker.make(shown.node, shown.dim, shown.offset, shown.offset + shown.stop)
            node.replace_all_uses_with(new)
