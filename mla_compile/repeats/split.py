"""Split a graph into calls of parts. A part is a separate graph, and equal stretches share one part."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from mla_compile.core.program import copy_graph, view_source
from mla_compile.repeats.stretches import (
    Stretch,
    alone,
    is_closed,
    memory_of,
    stretches,
    values_of,
)


def split(
    gm: fx.GraphModule, example_inputs: Sequence[object]
) -> tuple[fx.GraphModule, dict[str, list[object]]] | None:
    """Return the graph as calls of submodules, and a dict from submodule name to the example inputs of its first call.

    ``gm``: ATen with ``meta["val"]`` on every node; it is not changed. ``example_inputs``: one per placeholder. A
    submodule takes the values it reads and returns one flat tuple.

    Returns None if nothing repeats or if parts cannot be compiled separately. Parts cannot be compiled separately in
    three cases: a part may receive memory through two inputs and write to it, values between parts may be tensor
    subclasses, or sizes may depend on data.
    """
    source = copy_graph(gm.graph)
    inputs = [node for node in source.nodes if _is_given(node)]
    _write_early(source)
    found = stretches(source, set(inputs))
    if found is None:
        return None
    examples = dict(zip(source.find_nodes(op="placeholder"), example_inputs, strict=True))
    if not all(is_closed(one) for one in found) or _writes_to_shared(found, examples):
        return None
    symbols = {_symbol(node): node for node in examples if _symbol(node) is not None}
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    names: dict[Hashable, str] = {}
    modules: dict[str, fx.GraphModule] = {}
    examples_of: dict[str, list[object]] = {}
    for one in found:
        sizes = _sizes(one, symbols)
        if sizes is None:
            return None
        given = [*one.inputs, *sizes]
        if one.kind not in names:
            names[one.kind] = name = f"part_{len(names)}"
            values = [examples[node] if node in examples else node.meta["val"] for node in given]
            modules[name], examples_of[name] = fx.GraphModule({}, alone(one, given)), values
        call = graph.call_module(names[one.kind], tuple(copied[node] for node in given))
        for index, place in enumerate(one.outputs):
            copied[one.steps[place]] = graph.call_function(operator.getitem, (call, index))
    output = source.output_node()
    graph.output(fx.node.map_arg(output.args[0], copied.__getitem__))
    constants = {
        str(node.target): operator.attrgetter(str(node.target))(gm) for node in graph.find_nodes(op="get_attr")
    }
    # Lazy modules are avoided, because they call themselves when they run, and users' global hooks would see the call.
    return fx.GraphModule({**constants, **modules}, graph), examples_of


def _write_early(graph: fx.Graph) -> None:
    """Move each write of an input directly after the last read of the input's old value.

    In mla_compile's graphs, inputs are written at the end of the graph, except for appended rows. Reads through views
    count as reads of the input.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    shown: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (root := _root(node)) is not node:
            shown.setdefault(root, []).append(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, new = node.args[:2]
        if target.op == "placeholder":
            views = [target, *shown.get(target, ())]
            readers = {user for view in views for user in view.users if user.op != "output"} - {node}
            last = max((*readers, new), key=order.__getitem__)
            if last.op == "call_function" and order[last] < order[node]:
                last.append(node)


def _is_given(node: fx.Node) -> bool:
    """Whether a node exists before anything is computed: inputs, constants, and the plain tensors of a subclass."""
    return node.op in ("placeholder", "get_attr") or node.target is getattr


def _writes_to_shared(found: Sequence[Stretch], examples: dict[fx.Node, object]) -> bool:
    """Whether a stretch writes to memory that it may receive through two inputs.

    A part is compiled for its first call, whose inputs have separate memory.
    """
    storages = Counter(memory_of(value) for value in examples.values() if isinstance(value, torch.Tensor))
    for one in found:
        own, roots = set(one.steps), Counter(_root(node) for node in one.inputs)
        for node in one.steps:
            for written in _written(node):
                inside = written
                while inside in own and (source := view_source(inside)) is not None:
                    inside = source
                if inside in own:
                    continue
                known = examples.get(inside)
                if not isinstance(known, torch.Tensor) or storages[memory_of(known)] > 1 or roots[inside] > 1:
                    return True
    return False


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            yield from (one for one in pytree.tree_leaves(value) if isinstance(one, fx.Node))


def _root(node: fx.Node) -> fx.Node:
    """Follow views back to their source, and return the source."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def _sizes(one: Stretch, known: dict[object, fx.Node]) -> list[fx.Node] | None:
    """Return the graph inputs for sizes that a stretch uses and has no input for; None if a size is unknown."""
    given = {_symbol(node) for node in one.inputs}
    symbols = set[object]().union(*(free_symbols(value) for value in values_of((*one.inputs, *one.steps)))) - given
    tensors = (node.meta["val"] for node in one.inputs if isinstance(node.meta["val"], torch.Tensor))
    said = {_expression(size) for value in tensors for size in value.shape}
    return [known[s] for s in sorted(symbols & known.keys(), key=str)] if symbols <= known.keys() | said else None


def _symbol(node: fx.Node) -> object:
    """Return a node's value if it is a single symbol; None for any other value, including compound expressions."""
    expression = _expression(node.meta.get("val"))
    return expression if getattr(expression, "is_symbol", False) else None


def _expression(value: object) -> object:
    return value.node.expr if isinstance(value, torch.SymInt) else None
