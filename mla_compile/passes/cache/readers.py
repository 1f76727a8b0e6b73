"""Which attentions read which cached tensors of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.sources.records import Side

Read: TypeAlias = "dict[Side, dict[fx.Node, int]]"
"""The cached tensors that an attention reads, with their token axes."""


def grouped(reads: Sequence[tuple[AttentionSite, Read]]) -> list[list[tuple[AttentionSite, Read]]]:
    """Group the attentions that read cached tensors. Attentions that share a tensor are in the same group."""
    groups: list[tuple[set[fx.Node], list[tuple[AttentionSite, Read]]]] = []
    for site, read in reads:
        tensors, joined = {*read["keys"], *read["values"]}, [(site, read)]
        for other in [g for g in groups if not g[0].isdisjoint(tensors)]:
            groups.remove(other)
            tensors, joined = tensors | other[0], [*other[1], *joined]
        if tensors:
            groups.append((tensors, joined))
    return [group for _, group in groups]


def sides_of(read: Read, tensor: fx.Node) -> frozenset[Side]:
    """Return whether ``tensor`` is read as keys, as values, or as both."""
    return frozenset(side for side in read if tensor in read[side])


def alone(read: Read, side: Side) -> dict[fx.Node, int]:
    """Return the tensors that are read only as ``side``; none if the other side reads no cached tensor."""
    (other,) = (read[one] for one in read if one != side)
    apart = {node: tokens for node, tokens in read[side].items() if node not in other}
    return apart if other else {}
