"""Treat rows that the model copies to all heads as one row per token, even if operators follow the copy.

In ``R = rotate(expand(r)); attention(q, cat([K, R]), V)``, all heads of R are equal if the operators between the copy
and R treat all copies alike (:mod:`mla_compile.passes.dependence.steps`). R is then its first head, ``R[:, 0]``,
broadcast to all heads. The first head is a *virtual source*: it is added to the graph only if an attention that reads
it is absorbed. So a shared rotary key is one row per token, whether the model rotates before or after the copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.steps import Joined, step
from mla_compile.passes.ir.graph import is_tensor, packet, shape, virtual
from mla_compile.passes.ir.moves import Copy, Fill, Reorder, Repeat
from mla_compile.passes.ir.operators import CONTRACTIONS, behind, decode
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import REACH
from mla_compile.passes.linear.records import SharedRows

aten = torch.ops.aten


def find_shared_rows(
    sites: Iterable[AttentionSite], weights: Collection[fx.Node], fake_mode: FakeTensorMode | None
) -> dict[fx.Node, SharedRows]:
    """Return the tensors upstream of K and V of ``sites`` that are the same for all heads."""
    copies = _EqualAxes(weights)
    found: dict[fx.Node, SharedRows] = {}
    for site in sites:
        operands = [*(p.k for p in site.products), site.v]
        for atom in site.lead:
            places = [(o.node, k) for o in operands for k, own in enumerate(o.axes) if atom in own]
            walks = [_walk(node, dim, weights, copies) for node, dim in places]
            if not any(walk.made for walk in walks):
                continue  # a batch axis, not heads
            for rows, dim in (place for walk in walks for place in walk.found):
                if rows not in found:
                    made_of = copies.made_of(rows, dim)
                    one = virtual(fake_mode, aten.select.int, rows, dim, 0, decided_by=made_of)
                    found[rows] = SharedRows(dim, one)
    return found


@dataclass
class _Walk:
    """The result of a walk back from one axis of K or V.

    ``found``: the tensors that are constant along an axis, each with this axis. Plain copies are left out. ``made``:
    whether a weight makes the positions of the axis, as for heads.
    """

    found: list[tuple[fx.Node, int]] = field(default_factory=list)
    made: bool = False


def _walk(operand: fx.Node, dim: int, weights: Collection[fx.Node], copies: _EqualAxes) -> _Walk:
    walk = _Walk()
    places = {(operand, dim): None}
    queue = [(operand, dim)]
    for node, at in queue:
        how = step(node, at)
        if node in weights:
            walk.made = True
        elif copies.along(node, at):
            node, at = _shown(node, at)
            # A plain copy is not recorded, because the linear maps see through it.
            if not _just_copied(node):
                walk.found.append((node, at))
        elif how is None:
            walk.made |= packet(node) in CONTRACTIONS and any(n in weights for n in node.all_input_nodes)
        elif len(places) < REACH:
            parts = ((p.node, p) for p in how.parts) if isinstance(how, Joined) else how.reads.items()
            for read, p in parts:
                if (read, p.dim) not in places:
                    places[read, p.dim] = None
                    queue.append((read, p.dim))
    return walk


def _shown(node: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """Look through slices along ``dim``. Return the tensor that holds all copies, and the axis of the copies."""
    while isinstance(how := step(node, dim), Joined):
        node, dim = how.parts[0].node, how.parts[0].dim
    return node, dim


def _just_copied(node: fx.Node) -> bool:
    return isinstance(decode(behind(node, (Reorder, Copy))[-1]), (Repeat, Fill))


class _EqualAxes:
    """Determines along which axes a tensor has the same values at all positions."""

    def __init__(self, weights: Collection[fx.Node]) -> None:
        self.weights = weights
        self._along: dict[tuple[fx.Node, int], bool] = {}

    def along(self, node: fx.Node, dim: int, depth: int = 0) -> bool:
        key = (node, dim)
        if key not in self._along:
            length = shape(node)[dim]
            # A symbolic axis is not known to hold heads.
            several = isinstance(length, int) and length > 1
            reads = self._reads(node, dim) if several and depth < REACH else None
            self._along[key] = reads is not None and all(self.along(n, own, depth + 1) for n, own in reads)
        return self._along[key]

    def made_of(self, node: fx.Node, dim: int) -> tuple[fx.Node, ...]:
        """Return the inputs of the copies: the copied tensors, and all other inputs of operators on copies."""
        found: dict[fx.Node, None] = {}
        queue = [(node, dim)]
        for one, at in queue:
            reads = self._reads(one, at) or []
            queue += [place for place in reads if place not in queue]
            along = {n for n, _ in reads}
            found.update((n, None) for n in one.all_input_nodes if is_tensor(n) and n not in along | {*self.weights})
        # Some operators read a copy only for a dtype or shape (`type_as`, `zeros_like`). The copy is left out, because
        # the nodes in `found` determine it.
        copies = {one for one, _ in queue}
        return tuple(n for n in found if n not in copies)

    def _reads(self, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]] | None:
        """Return the operand axes that must be constant so that ``node`` is constant along ``dim``; None if unknown."""
        read = decode(node)
        if isinstance(read, Fill):
            return []
        if isinstance(read, Repeat) and read.map is not None:
            return [(read.x, k) for k in read.map.read_along(dim) if not same(shape(read.x)[k], 1)]
        how = step(node, dim)
        if isinstance(how, Joined):
            # A join of two constant tensors may not be constant.
            return [(p.node, p.dim) for p in how.parts] if len(how.parts) == 1 else None
        if how is None or how.unit > 1:
            return None
        return [(n, p.dim) for n, p in how.reads.items() if not same(shape(n)[p.dim], 1)]
