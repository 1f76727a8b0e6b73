"""Operators that several ranks run together (torch.distributed), which nobody may run alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mla_compile.passes.ir.graph import OURS
from mla_compile.passes.ir.schema import named_arguments, schema_name
from mla_compile.passes.ir.walk import reachable

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem", "_dtensor")


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` sends or receives numbers of other ranks, or waits for them."""
    return schema_name(node).partition("::")[0] in _NAMESPACES


def gathered(nodes: Iterable[fx.Node]) -> bool:
    """Whether numbers of other ranks are in what ``nodes`` compute: it can be computed in the graph only."""
    return any(map(is_collective, reachable(nodes, lambda node: node.all_input_nodes)))


def collectives(graph: fx.Graph) -> list[tuple[str, tuple[object, ...]]]:
    """What ``graph`` had the ranks do together before passes added to it, in order.

    The operators, and what they are told besides tensors.
    """
    alive = set(reachable([graph.output_node()], lambda node: node.all_input_nodes))
    return [
        (schema_name(node), tuple(a for a in named_arguments(node).values() if not isinstance(a, fx.Node)))
        for node in graph.nodes
        if node in alive and is_collective(node) and OURS not in node.meta
    ]
