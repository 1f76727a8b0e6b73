"""Rows that were copied to all heads before something was done to them are copied last.

Before::

    R = rotate(expand(r)); attention(q, cat([K, R]), V)

After::

    R = rotate(expand(r)); one = R[:, 0]; attention(q, cat([K, expand(one)]), V)

As long as nothing on the way tells the copies apart (:mod:`mla_compile.passes.dependence.steps`), one head has the
numbers of all. So a shared rotary key is one row per token, in whatever order it was rotated and copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.dependence.steps import Joined, step
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import Builder, packet, shape
from mla_compile.passes.ir.operators import CONTRACTIONS, Broadcast, Copy, Fill, Permute, Regroup, Repeat, decode
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import REACH

aten = torch.ops.aten


class Copied(NamedTuple):
    """``rows``, the same for all heads, the first of them, and that one copied again, which is read instead."""

    rows: fx.Node
    one: fx.Node
    copied: fx.Node


def share_rows(
    sites: Iterable[AttentionSite], weights: Collection[fx.Node], fake_mode: FakeTensorMode | None
) -> list[Copied]:
    """Makes the copies that K and V of ``sites`` are joined of again, from one."""
    copies = _Copies()
    done: dict[fx.Node, Copied] = {}
    for site in sites:
        operands = [*(p.k for p in site.products), site.v]
        for atom in site.lead:
            places = [(o.node, k) for o in operands for k, own in enumerate(o.axes) if atom in own]
            walks = [_walk(node, dim, weights, copies) for node, dim in places]
            if not any(walk.made for walk in walks):
                continue  # sequences of a batch
            for rows, dim, users in (found for walk in walks for found in walk.found):
                if rows not in done:
                    done[rows] = _copied(rows, dim, fake_mode)
                for user in users:
                    if user is not done[rows].one:
                        user.replace_input_with(rows, done[rows].copied)
    return list(done.values())


def restore_copies(found: Iterable[Copied]) -> None:
    """What still reads a tensor in copies reads what it read before: attentions that stay, stay as they were."""
    for rows, _, copied in found:
        copied.replace_all_uses_with(rows)


@dataclass
class _Walk:
    """What is behind an axis of K or V: copies that something was done to, with their axis and their readers.

    ``made``: a weight makes some of its positions, as heads are made.
    """

    found: list[tuple[fx.Node, int, list[fx.Node]]] = field(default_factory=list)
    made: bool = False


def _walk(operand: fx.Node, dim: int, weights: Collection[fx.Node], copies: _Copies) -> _Walk:
    walk = _Walk()
    readers = {(operand, dim): [n for n in operand.users if n.op == "call_function"]}
    queue = [(operand, dim)]
    for place in queue:
        node, at = place
        how = step(node, at)
        if node in weights:
            walk.made = True
        elif copies.along(node, at):
            if not _just_copied(node):
                walk.found.append((node, at, readers[place]))
        elif how is None:
            walk.made |= packet(node) in CONTRACTIONS and any(n in weights for n in node.all_input_nodes)
        elif len(readers) < REACH:
            parts = ((p.node, p) for p in how.parts) if isinstance(how, Joined) else how.reads.items()
            for read, p in parts:
                if (read, p.dim) not in readers:
                    queue.append((read, p.dim))
                readers.setdefault((read, p.dim), []).append(node)
    return walk


def _just_copied(node: fx.Node) -> bool:
    while isinstance(how := decode(node), (Regroup, Permute, Copy)):
        node = how.x
    return isinstance(how, (Broadcast, Repeat, Fill))


class _Copies:
    """Which axes have the same numbers at all of their positions."""

    def __init__(self) -> None:
        self._along: dict[tuple[fx.Node, int], bool] = {}

    def along(self, node: fx.Node, dim: int, depth: int = 0) -> bool:
        key = (node, dim)
        if key not in self._along:
            length = shape(node)[dim]
            several = isinstance(length, int) and length > 1
            self._along[key] = several and depth < REACH and self._found(node, dim, depth + 1)
        return self._along[key]

    def _found(self, node: fx.Node, dim: int, depth: int) -> bool:
        read = decode(node)
        if isinstance(read, Fill):
            return True
        if isinstance(read, Broadcast) or (isinstance(read, Repeat) and not read.interleaved):
            own = dim - len(shape(node)) + len(shape(read.x))
            return own < 0 or same(shape(read.x)[own], 1) or self.along(read.x, own, depth)
        how = step(node, dim)
        if isinstance(how, Joined):
            return len(how.parts) == 1 and self.along(how.parts[0].node, how.parts[0].dim, depth)
        if how is None or (how.unit > 1 and not isinstance(read, Repeat)):
            return False
        return all(same(shape(n)[p.dim], 1) or self.along(n, p.dim, depth) for n, p in how.reads.items())


def _copied(rows: fx.Node, dim: int, fake_mode: FakeTensorMode | None) -> Copied:
    builder = Builder(rows.next, fake_mode)
    one = builder.call(aten.select.int, rows, dim, 0)
    sizes = [n if d == dim else -1 for d, n in enumerate(shape(rows))]
    copied = builder.call(aten.expand.default, builder.call(aten.unsqueeze.default, one, dim), sizes)
    return Copied(rows, one, same_layout(builder, copied, rows))
