"""Walks over a graph: what a node is computed from, what weights alone decide, what nobody needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from mla_compile.passes.ir.graph import argument, packet


def remove_dead_code(graph: fx.Graph) -> None:
    """Dead code removal that also takes fused attentions without dropout, which torch counts among random operators."""

    def stays(node: fx.Node) -> bool:
        attention = packet(node) is torch.ops.aten.scaled_dot_product_attention
        sure = attention and argument(node, 4, "dropout_p", 0.0) == 0.0
        return node.is_impure() and not sure

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
