"""Walks over a graph: what a node is computed from, what weights alone decide, what nobody needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import fx

from mla_compile.passes.ir.graph import WAITS, argument, packet

REACH = 48
"""Operators that a search looks at before it gives up.

Between two parts of one attention (a softmax and its products, K and what it was projected or joined from) lie scales,
masks, casts, views and a rotation: a dozen or two where each is written out. Four times a dozen finds them all, and is
no walk through the model: what is farther away belongs to another layer, and would be blamed for this one.
"""


def nearest(
    start: fx.Node,
    step: Callable[[fx.Node], Iterable[fx.Node]],
    wanted: Callable[[fx.Node], bool],
    ends_at: Callable[[fx.Node], bool],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nearest wanted nodes, and those passed on the way; the walk goes no further than where it ends."""
    ends: list[fx.Node] = []
    passed: list[fx.Node] = []
    queue, seen = deque(step(start)), set[fx.Node]()
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
    """Dead code removal that also takes fused attentions without dropout, which torch counts among random operators."""

    def stays(node: fx.Node) -> bool:
        attention = packet(node) is torch.ops.aten.scaled_dot_product_attention
        sure = attention and argument(node, 4, "dropout_p", 0.0) == 0.0
        return WAITS in node.meta or (node.is_impure() and not sure)

    graph.eliminate_dead_code(stays)


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that ``node``'s numbers depend on, nearest first; a tensor it only takes a size from is none."""
    seen: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        current = queue.pop(0)
        if current not in seen and not isinstance(current.meta.get("val"), (int, torch.SymInt)):
            seen.add(current)
            yield current
            queue.extend(current.all_input_nodes)


def weight_nodes(graph: fx.Graph, known: Collection[str]) -> set[fx.Node]:
    """Every node computed from weights and constants only: ``known`` names inputs that are weights."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.name in known or node.op == "get_attr":
                found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            tags = getattr(node.target, "tags", ())
            if torch.Tag.nondeterministic_seeded not in tags:
                found.add(node)
    return found
