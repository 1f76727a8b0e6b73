"""Walks over a graph: dependences, nodes that depend only on weights, dead code."""

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

Between two parts of one attention (a softmax and its products, K and the tensors from which it was projected or joined)
lie scales, masks, casts, views and a rotation: one or two dozen operators if each is written out. Four dozen reach all
of them but not the rest of the model, where an operator of another layer would be blamed for this one.
"""


def nearest(
    start: fx.Node,
    step: Callable[[fx.Node], Iterable[fx.Node]],
    wanted: Callable[[fx.Node], bool],
    ends_at: Callable[[fx.Node], bool],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nearest wanted nodes and the nodes passed on the way; the walk does not continue past ``ends_at``."""
    ends: list[fx.Node] = []
    passed: list[fx.Node] = []
    queue, seen = deque(step(start)), set[fx.Node]()
    # Breadth first, so that the nearest nodes are found before the walk gives up.
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
        # torch keeps random operators, because removing one would shift the generator; with p = 0 nothing is drawn.
        return waits(node) or (node.is_impure() and not sure)

    graph.eliminate_dead_code(stays)


def reachable(start: Iterable[T], step: Callable[[T], Iterable[T]], most: int | None = None) -> Iterator[T]:
    """Yield ``start`` and every node to which ``step`` leads from there, each once, nearest first.

    With ``most``, no further steps are taken once that many nodes besides ``start`` are known.
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
    """Yield every node on whose values ``node`` depends, nearest first, except tensors of which only a size is read.

    With ``back_to``, nodes that come before all of these in the graph are left out.
    """
    if back_to is None:
        return reachable(computed_from(node), computed_from)
    oldest = min((n for n in back_to if not is_virtual(n)), default=None)

    # Nodes before all of `back_to` in the graph cannot read them; without this bound, each search would walk the whole
    # model. Virtual nodes have no position in the graph.
    def step(of: fx.Node) -> list[fx.Node]:
        return [n for n in computed_from(of) if is_virtual(n) or (oldest is not None and not n < oldest)]

    return reachable(step(node), step)


def length_behind(builder: Builder, node: fx.Node, dim: int) -> int | fx.Node:
    """Return the length of an axis as an argument, read from the earliest tensor behind ``node`` that has it."""
    length, behind = shape(node)[dim], islice(ancestors(node), REACH)
    having = [(n, k) for n in behind if is_tensor(n) for k, other in enumerate(shape(n)) if same(other, length)]
    return builder.size(*min(having, default=(node, dim)))


def depends_on(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether any of ``others`` is among the :func:`ancestors` of ``node``."""
    return any(n in others for n in ancestors(node, others))


def computed_from(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from whose values ``node`` is computed directly."""
    # A length is not a value of the tensor: with dynamic shapes, `sym_size` of the inputs would link everything.
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), (int, torch.SymInt))]


def first_equals(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map every node to the first node that computes the same: the same operator on the same arguments."""
    first: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, fx.Node] = {}

    def read(value: object) -> Hashable:
        return first[value] if isinstance(value, fx.Node) else number_of(value)

    for node in graph.nodes:
        first[node] = node
        # torch counts random operators as impure. Nothing else is impure, because graphs are functional.
        if node.op in ("call_function", "get_attr") and not node.is_impure():
            first[node] = known.setdefault((node.target, each(node.args, read), each(node.kwargs, read)), node)
    return first


def leads_to(first: fx.Node, last: fx.Node) -> bool:
    """Whether ``last`` depends on ``first``, even if only on its sizes."""
    # Nodes before `first` in the graph cannot read it; without this bound, each search would walk the whole model.
    return first in reachable([last], lambda node: (n for n in node.all_input_nodes if not n < first))


def weight_nodes(graph: fx.Graph, known: Collection[str]) -> set[fx.Node]:
    """Return every node computed from weights and constants only; ``known`` names inputs that are weights."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.name in known or node.op == "get_attr":
                found.add(node)
        # `all` of an empty list is true: `arange` and `full` are constants.
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            tags = getattr(node.target, "tags", ())
            # `rand` has no inputs either, but its value changes in each call and must not be computed ahead.
            if torch.Tag.nondeterministic_seeded not in tags:
                found.add(node)
    return found
