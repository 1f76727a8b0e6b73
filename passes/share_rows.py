"""Rows that were copied to all heads before something was done to them are copied last.

Before::

    R = rotate(expand(r)); attention(q, cat([K, R]), V)

After::

    R = rotate(expand(r)); one = R[:, 0]; attention(q, cat([K, expand(one)]), V)

As long as nothing on the way tells the copies apart (:mod:`mla_compile.passes.axis_steps`), one head has the numbers of
all. So a shared rotary key is one row per token, in whatever order it was rotated and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.axis_steps import Joined, step
from mla_compile.passes.graph import Builder, args_of, packet, same, shape
from mla_compile.passes.linear_map import LinearMaps
from mla_compile.passes.linear_rules import RULES
from mla_compile.passes.linear_segments import FILLS
from mla_compile.passes.linear_views import expand, permute, repeat, same_values, view
from mla_compile.passes.site import AttentionSite

aten = torch.ops.aten
_COPY = (aten.expand, aten.expand_as, aten.repeat, aten.tile)
_REACH = 48
"""Operators between an attention and the copying that are looked at, at the most."""


def share_rows(sites: Iterable[AttentionSite], maps: LinearMaps) -> int:
    """Makes the copies that K and V of ``sites`` are joined of again, from one; returns how many tensors that are."""
    copies = _Copies()
    done: dict[fx.Node, fx.Node] = {}
    for site in sites:
        for operand in dict.fromkeys([*(p.k.node for p in site.products), site.v.node]):
            for rows, dim, users in list(_ends(operand, maps, copies)):
                if rows not in done:
                    done[rows] = _copied(rows, dim, maps.fake_mode)
                for user in users:
                    user.replace_input_with(rows, done[rows])
    return len(done)


def _ends(operand: fx.Node, maps: LinearMaps, copies: _Copies) -> Iterator[tuple[fx.Node, int, list[fx.Node]]]:
    """Copies on the way to ``operand`` to which something was done, their axis, and who reads them."""
    readers: dict[fx.Node, list[fx.Node]] = {operand: [n for n in operand.users if n.op == "call_function"]}
    queue = [operand]
    for node in queue:
        dim = next((d for d in range(len(shape(node))) if copies.along(node, d)), None)
        if dim is not None:
            if not _just_copied(node):
                yield node, dim, readers[node]
        elif packet(node) in RULES:
            for read in maps.operands(node):
                if read not in readers and len(readers) < _REACH:
                    readers[read] = []
                    queue.append(read)
                if read in readers and read in node.all_input_nodes:
                    readers[read].append(node)


def _just_copied(node: fx.Node) -> bool:
    while (rule := RULES.get(packet(node))) in (view, permute, same_values):
        node = args_of(node)[0]
    return rule in (expand, repeat)


class _Copies:
    """Which axes have the same numbers at all of their positions."""

    def __init__(self) -> None:
        self._along: dict[tuple[fx.Node, int], bool] = {}

    def along(self, node: fx.Node, dim: int, depth: int = 0) -> bool:
        key = (node, dim)
        if key not in self._along:
            length = shape(node)[dim]
            several = isinstance(length, int) and length > 1
            self._along[key] = several and depth < _REACH and self._found(node, dim, depth + 1)
        return self._along[key]

    def _found(self, node: fx.Node, dim: int, depth: int) -> bool:
        if packet(node) in FILLS:
            return True
        if packet(node) in _COPY:
            x = args_of(node)[0]
            own = dim - len(shape(node)) + len(shape(x))
            return own < 0 or same(shape(x)[own], 1) or self.along(x, own, depth)
        how = step(node, dim)
        if isinstance(how, Joined):
            return len(how.parts) == 1 and self.along(how.parts[0].node, how.parts[0].dim, depth)
        if how is None or (how.unit > 1 and packet(node) is not aten.repeat_interleave):
            return False
        return all(same(shape(n)[p.dim], 1) or self.along(n, p.dim, depth) for n, p in how.reads.items())


def _copied(rows: fx.Node, dim: int, fake_mode: FakeTensorMode | None) -> fx.Node:
    """The first of the copies in ``rows``, copied again."""
    builder = Builder(rows.next, fake_mode)
    one = builder.call(aten.unsqueeze.default, builder.call(aten.select.int, rows, dim, 0), dim)
    sizes = [n if d == dim else -1 for d, n in enumerate(shape(rows))]
    return builder.call(aten.expand.default, one, sizes)
