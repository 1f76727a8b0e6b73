"""Operators that several ranks run together (torch.distributed), and that no rank may run alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import fx

from mla_compile.passes.ir.graph import OURS, bytes_hint, is_tensor
from mla_compile.passes.ir.schema import named_arguments, schema_name
from mla_compile.passes.ir.walk import reachable

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem", "_dtensor")


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` exchanges data with other ranks or waits for such data."""
    return schema_name(node).partition("::")[0] in _NAMESPACES


def gathered(nodes: Iterable[fx.Node]) -> bool:
    """Whether ``nodes`` depend on data of other ranks. Such nodes must be computed in the graph, in every call."""
    return any(map(is_collective, reachable(nodes, lambda node: node.all_input_nodes)))


def collectives(graph: fx.Graph) -> list[tuple[str, tuple[object, ...]]]:
    """Return the collectives of ``graph`` that were not added by passes, in graph order.

    Each entry is the name of the operator and its non-tensor arguments. Dead nodes are left out.
    """
    alive = set(reachable([graph.output_node()], lambda node: node.all_input_nodes))
    return [
        (schema_name(node), tuple(a for a in named_arguments(node).values() if not isinstance(a, fx.Node)))
        for node in graph.nodes
        if node in alive and is_collective(node) and OURS not in node.meta
    ]


def received_bytes(graph: fx.Graph, *, ours: bool = False) -> dict[str, int]:
    """Return the bytes that a rank receives in one call of ``graph``, by name of the collective operator.

    Operands have the sizes seen at tracing, and the algorithms are assumed to be optimal. With n ranks, an all-gather
    receives n - 1 operands. Other collectives receive (n - 1)/n of an operand. An all-reduce receives twice this share,
    because it is a reduce-scatter and an all-gather. ``ours``: count only the collectives that passes added.
    """
    found: dict[str, int] = {}
    alive = set(reachable([graph.output_node()], lambda node: node.all_input_nodes))
    for node in graph.nodes:
        name = schema_name(node).partition("::")[2].removesuffix("_")
        if node not in alive or not is_collective(node) or name == "wait_tensor" or (ours and OURS not in node.meta):
            continue
        group = named_arguments(node)["group_name"]
        n = dist.distributed_c10d._get_group_size_by_name(group)
        size = sum(bytes_hint(x) for x in node.all_input_nodes if is_tensor(x))
        times = {"all_gather_into_tensor": n * (n - 1), "all_reduce": 2 * (n - 1)}.get(name, n - 1)
        found[name] = found.get(name, 0) + size * times // n
    return found
