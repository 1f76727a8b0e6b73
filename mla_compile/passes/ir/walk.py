"""Walks over a graph: dependences between nodes, nodes that depend only on weights, and dead code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import fx

from mla_compile.core.alike import each, number_of
from mla_compile.passes.ir.graph import Builder, argument, is_tensor, is_virtual, packet, shape
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stand_in import waits

T = TypeVar("T")

REACH = 48
"""The most operators that a search visits.

One or two dozen operators may lie between two points of one attention, such as K and the softmax: scales, masks, casts,
views and a rotation. A search of four dozen operators is therefore enough. It does not reach another layer, whose
operators would be blamed by mistake.
"""


def nearest(
    start: fx.Node,
    step: Callable[[fx.Node], Iterable[fx.Node]],
    wanted: Callable[[fx.Node], bool],
    ends_at: Callable[[fx.Node], bool],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nearest wanted nodes, and the nodes passed on the way to them.

    The walk does not continue past a node for which ``ends_at`` is true.
    """
    ends: list[fx.Node] = []
    passed: list[fx.Node] = []
    queue, seen = deque(step(start)), set[fx.Node]()
    # The search is breadth first, so that it finds the nearest nodes before it gives up.
    while queue and len(passed) < REACH:
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        if wanted(node):
            ends.append(node)
        elif not ends_at(node):
            passed.append(node)
            queue.extend(step(node))
    return ends, passed


def remove_dead_code(graph: fx.Graph) -> None:
    """Remove dead code, including fused attentions without dropout, which torch counts as random operators.

    A node that has a stand-in is kept although nothing reads it.
    """

    def stays(node: fx.Node) -> bool:
        attention = packet(node) is torch.ops.aten.scaled_dot_product_attention
        sure = attention and argument(node, 4, "dropout_p", 0.0) == 0.0
        # Torch keeps random operators, because removing them would shift the random numbers of later operators. With p
        # = 0, nothing is drawn.
        return waits(node) or (node.is_impure() and not sure)

    graph.eliminate_dead_code(stays)


def reachable(start: Iterable[T], step: Callable[[T], Iterable[T]], most: int | None = None) -> Iterator[T]:
    """Yield the nodes of ``start`` and every node that ``step`` reaches from them, each once, nearest first.

    ``most``: once this many nodes besides ``start`` are known, ``step`` is not called again.
    """
    queue = deque(dict.fromkeys(start))
    seen = set(queue)
    limit = None if most is None else most + len(seen)
    while queue:
        node = queue.popleft()
        yield node
        if limit is None or len(seen) < limit:
            for n in step(node):
                if n not in seen:
                    seen.add(n)
                    queue.append(n)


def ancestors(node: fx.Node, back_to: Collection[fx.Node] | None = None) -> Iterator[fx.Node]:
    """Yield every node on whose values ``node`` depends, nearest first.

    Tensors of which only a size is read are left out. If ``back_to`` is given, nodes that precede all of ``back_to`` in
    the graph are left out too.
    """
    if back_to is None:
        return reachable(computed_from(node), computed_from)
    oldest = min((n for n in back_to if not is_virtual(n)), default=None)

    # Nodes that precede all of `back_to` in the graph cannot depend on `back_to`. Without this bound, each search would
    # walk the whole model. Virtual nodes have no position in the graph.
    def step(of: fx.Node) -> list[fx.Node]:
        return [n for n in computed_from(of) if is_virtual(n) or (oldest is not None and not n < oldest)]

    return reachable(step(node), step)


def length_behind(builder: Builder, node: fx.Node, dim: int) -> int | fx.Node:
    """Return the length of an axis as an argument of an operator.

    The length is read from the earliest tensor found upstream of ``node`` that has an axis of this length.
    """
    length, behind = shape(node)[dim], islice(ancestors(node), REACH)
    having = [(n, k) for n in behind if is_tensor(n) for k, other in enumerate(shape(n)) if same(other, length)]
    return builder.size(*min(having, default=(node, dim)))


def depends_on(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether any of ``others`` is among the :func:`ancestors` of ``node``."""
    return any(n in others for n in ancestors(node, others))


def computed_from(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose values ``node`` reads."""
    # Lengths are left out. Otherwise, `sym_size` of the inputs would link everything in a dynamic graph.
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), (int, torch.SymInt))]


def first_equals(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map every node to the first node that applies the same operator to the same arguments."""
    first: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, fx.Node] = {}

    def read(value: object) -> Hashable:
        return first[value] if isinstance(value, fx.Node) else number_of(value)

    for node in graph.nodes:
        first[node] = node
        # Torch counts random operators as impure. Nothing else is impure, because graphs are functional.
        if node.op in ("call_function", "get_attr") and not node.is_impure():
            first[node] = known.setdefault((node.target, each(node.args, read), each(node.kwargs, read)), node)
    return first


def leads_to(first: fx.Node, last: fx.Node) -> bool:
    """Whether ``last`` depends on the values or sizes of ``first``."""
    # Nodes that precede `first` in the graph cannot depend on `first`. Without this bound, each search would walk the
    # whole model.
    return first in reachable([last], lambda node: (n for n in node.all_input_nodes if not n < first))


def weight_nodes(graph: fx.Graph, known: Collection[str]) -> set[fx.Node]:
    """Return every node computed from weights and constants only. ``known``: the names of inputs that are weights."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.name in known or node.op == "get_attr":
                found.add(node)
        # `arange` and `full` have no inputs and are constants, so `all` of an empty list has the right value: true.
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            tags = getattr(node.target, "tags", ())
            # `rand` has no inputs either, but its value changes in each call, so it must not be computed ahead.
            if torch.Tag.nondeterministic_seeded not in tags:
                found.add(node)
    return found
