"""The numeric check of an attention that was split by heads: all of its groups together against what it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.graph import is_tensor, whole_rows
from mla_compile.passes.ir.operators import Fill, decode
from mla_compile.passes.ir.walk import ancestors
from mla_compile.passes.rewrite.split_heads import SplitSite
from mla_compile.passes.verify.check import Check, compare


def check_split(
    split: SplitSite, groups: Sequence[Verdict], original: fx.Graph, weights: Mapping[str, torch.Tensor | None]
) -> Check:
    """Compares the joined output with the attention in ``original``, a copy of the graph made before the split."""
    before = {n.name: n for n in original.nodes}
    boundary = {n.name: before[n.name] for n in _boundary(groups, before, weights)}
    plan, group = next((v.plan, g) for v, g in zip(groups, split.groups, strict=True) if v.absorb)
    assert plan is not None
    share = (group.stop - group.start) / split.heads
    return compare(plan, before[split.name], split.joined, boundary, weights, share=share)


def _boundary(
    groups: Sequence[Verdict], before: Mapping[str, fx.Node], weights: Mapping[str, torch.Tensor | None]
) -> set[fx.Node]:
    """Nodes of both graphs from which all groups are computed: given values for these, both say the same.

    The rows that are absorbed are among them, and nothing between them and the attention is.
    """
    rows: list[fx.Node] = []
    others: list[fx.Node] = []
    for verdict in groups:
        site = verdict.site
        others += [*(p.q.node for p in site.products), *(m.operand.node for m in site.masks)]
        if verdict.absorb and verdict.plan is not None:
            rows += map(whole_rows, verdict.plan.sources)
        else:
            others += [*(p.k.node for p in site.products), site.v.node]
    found: set[fx.Node] = set()
    for row in sorted(rows):  # one group may read rows as another makes them
        found |= _frontier([row], before, found, weights)
    return found | _frontier(others, before, found, weights)


def _frontier(
    nodes: Iterable[fx.Node],
    before: Mapping[str, fx.Node],
    rows: Collection[fx.Node],
    weights: Mapping[str, torch.Tensor | None],
) -> set[fx.Node]:
    """The nearest nodes behind ``nodes`` that the original graph has too and that are not computed from ``rows``."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    seen = set(queue)
    while queue:
        node = queue.pop()
        if node in rows or node.name in weights or not (is_tensor(node) or node.all_input_nodes):
            continue
        if isinstance(decode(node), Fill):  # zeros that something is written into are no input, but zeros
            continue
        if is_tensor(node) and node.name in before and not any(a in rows for a in ancestors(node)):
            found.add(node)
            continue
        for n in node.all_input_nodes:
            if n not in seen:
                seen.add(n)
                queue.append(n)
    return found
