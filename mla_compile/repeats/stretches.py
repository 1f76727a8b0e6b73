"""Cut a graph into stretches of calls. Stretches of one kind compute the same function."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.repeats.find import LEAST_TIMES, CallSequence, cut, form


@dataclass(frozen=True)
class Stretch:
    """Consecutive calls, the values read from outside, and the positions of calls whose results are read outside.

    Stretches of one ``kind`` compute the same function.
    """

    steps: CallSequence
    inputs: list[fx.Node]
    outputs: list[int]
    kind: Hashable


def stretches(graph: fx.Graph, given: Container[fx.Node]) -> list[Stretch] | None:
    """Return the graph cut into stretches of few kinds; None if there are as many kinds as stretches.

    ``graph`` has ``meta["val"]`` on every node. It is changed: items of tuples are moved next to their tuple.
    ``given``: nodes that exist before any computation. They belong to no stretch.
    """
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), (tuple, list)):
            node.args[0].append(node)
    found: list[tuple[CallSequence, list[fx.Node], Hashable]] = []
    rest: list[fx.Node] = []

    def close() -> None:
        if rest:
            found.append((tuple(rest), form(rest)[1], len(found)))
            rest.clear()

    for repeated in cut([node for node in graph.nodes if node.op != "output" and node not in given]):
        forms = [form(steps) for steps in repeated]
        kinds = Counter(kind for kind, _ in forms)
        for steps, (kind, inputs) in zip(repeated, forms, strict=True):
            if kinds[kind] < LEAST_TIMES:
                rest += steps
            else:
                close()
                found.append((steps, inputs, kind))
    close()
    outputs: dict[Hashable, set[int]] = {}
    for steps, _, kind in found:
        own = set(steps)
        outputs.setdefault(kind, set()).update(i for i, node in enumerate(steps) if not own.issuperset(node.users))
    if len(outputs) == len(found):
        return None
    return [Stretch(steps, inputs, sorted(outputs[kind]), kind) for steps, inputs, kind in found]


def is_closed(one: Stretch) -> bool:
    """Whether a stretch takes and returns plain tensors and numbers, without unbacked sizes."""
    handed = [node.meta.get("val") for node in (*one.inputs, *(one.steps[place] for place in one.outputs))]
    plain = all(
        isinstance(v, (torch.Tensor, torch.SymInt, int)) and not is_traceable_wrapper_subclass(v) for v in handed
    )
    return plain and not any(free_unbacked_symbols(value) for value in values_of((*one.inputs, *one.steps)))


def values_of(nodes: Sequence[fx.Node]) -> Iterator[object]:
    """Yield the tensors and symbolic numbers among the values of nodes."""
    for value in pytree.tree_leaves([node.meta.get("val") for node in nodes]):
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value


def memory_of(value: torch.Tensor) -> int:
    """Return the identity of a live tensor's memory."""
    try:
        return int(StorageWeakRef(value.untyped_storage()).cdata)
    except NotImplementedError:  # a subclass may have no memory of its own
        return id(value)


def alone(one: Stretch, given: Sequence[fx.Node]) -> fx.Graph:
    """Return a stretch as a separate graph with the inputs ``given``."""
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for node in given:
        inside[node] = placeholder = graph.placeholder(node.name)
        placeholder.meta["val"] = node.meta["val"]
    for node in one.steps:
        inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[one.steps[place]] for place in one.outputs))
    return graph
