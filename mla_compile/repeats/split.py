"""A graph as calls of its parts: each part is a graph of its own, made once for all stretches that are equal."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.core.program import copy_graph, view_source
from mla_compile.repeats.find import LEAST_TIMES, Steps, cut, form


@dataclass(frozen=True)
class _Stretch:
    """Calls in a row, what they read of others, and what others read of them (as places among the calls)."""

    steps: Steps
    inputs: list[fx.Node]
    outputs: list[int]
    kind: Hashable


def split(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, dict[str, list[Any]]] | None:
    """The same as calls of submodules, and example inputs for each of these, by name: those of its first call.

    ``gm``: ATen with ``meta["val"]`` on every node; it stays as it is. ``example_inputs``: one for each placeholder.
    A part takes what it reads and returns one flat tuple.

    None where nothing repeats itself, and where parts cannot be compiled one by one: one writes to a tensor that it
    also reads as another input, or sizes depend on data.
    """
    source = fx.GraphModule(gm, copy_graph(gm.graph))
    _gather(source.graph)
    stretches = _stretches(source.graph)
    if stretches is None:
        return None
    examples = dict(zip(source.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    if not all(_is_closed(one) for one in stretches) or _writes_to_shared(stretches, examples):
        return None
    symbols = {_symbol(node): node for node in examples if _symbol(node) is not None}
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in source.graph.nodes:
        if _is_given(node):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    names: dict[Hashable, str] = {}
    modules: dict[str, fx.GraphModule] = {}
    examples_of: dict[str, list[Any]] = {}
    for one in stretches:
        sizes = _sizes(one, symbols)
        if sizes is None:
            return None
        given = [*one.inputs, *sizes]
        if one.kind not in names:
            names[one.kind] = name = f"part_{len(names)}"
            values = [examples[node] if node in examples else node.meta["val"] for node in given]
            modules[name], examples_of[name] = _graph_module(one, given), values
        call = graph.call_module(names[one.kind], tuple(copied[node] for node in given))
        for index, place in enumerate(one.outputs):
            copied[one.steps[place]] = graph.call_function(operator.getitem, (call, index))
    output = source.graph.output_node()
    graph.output(fx.node.map_arg(output.args[0], copied.__getitem__))
    constants = {
        str(node.target): operator.attrgetter(str(node.target))(gm) for node in graph.find_nodes(op="get_attr")
    }
    return fx.GraphModule({**constants, **modules}, graph), examples_of


def _gather(graph: fx.Graph) -> None:
    """Moves what belongs together into one place: items to their tuple, writes to the last reader of what they replace.

    A graph writes the new rows of all its caches at its end. A write moves up to where nothing reads the old values
    any more, through whatever view.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    shown: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (root := _root(node)) is not node:
            shown.setdefault(root, []).append(node)
    for node in list(graph.nodes):
        if node.target is operator.getitem and node.args[0].op == "call_function":
            node.args[0].append(node)
        elif node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            target, new = node.args[:2]
            views = [target, *shown.get(target, ())]
            readers = {user for view in views for user in view.users if user.op != "output"} - {node}
            last = max((*readers, new), key=order.__getitem__)
            if last.op == "call_function" and order[last] < order[node]:
                last.append(node)


def _stretches(graph: fx.Graph) -> list[_Stretch] | None:
    """The graph cut into calls of few kinds; None where there are as many kinds as calls."""
    found: list[tuple[Steps, list[fx.Node], Hashable]] = []
    rest: list[fx.Node] = []

    def close() -> None:
        if rest:
            found.append((tuple(rest), form(rest)[1], len(found)))
            rest.clear()

    for repeated in cut([node for node in graph.nodes if node.op != "output" and not _is_given(node)]):
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
    stretches = [_Stretch(steps, inputs, sorted(outputs[kind]), kind) for steps, inputs, kind in found]
    return stretches if len(outputs) < len(stretches) else None


def _is_given(node: fx.Node) -> bool:
    """Whether a node is there before anything is computed: inputs, constants, and the plain tensors of a subclass."""
    return node.op in ("placeholder", "get_attr") or node.target is getattr


def _is_closed(one: _Stretch) -> bool:
    """Whether a stretch takes and returns plain tensors and numbers, of sizes that follow from those of its inputs."""
    handed = [node.meta.get("val") for node in (*one.inputs, *(one.steps[place] for place in one.outputs))]
    plain = all(
        isinstance(v, (torch.Tensor, torch.SymInt, int)) and not is_traceable_wrapper_subclass(v) for v in handed
    )
    return plain and not any(free_unbacked_symbols(value) for value in _values((*one.inputs, *one.steps)))


def _writes_to_shared(stretches: Sequence[_Stretch], examples: dict[fx.Node, Any]) -> bool:
    """Whether some stretch writes to memory that it may be given twice.

    A part is compiled for inputs of separate memory, as its first call has them.
    """
    storages = Counter(_memory(value) for value in examples.values() if isinstance(value, torch.Tensor))
    for one in stretches:
        own, roots = set(one.steps), Counter(_root(node) for node in one.inputs)
        for node in one.steps:
            for written in _written(node):
                inside = written
                while inside in own and (source := view_source(inside)) is not None:
                    inside = source
                if inside in own:
                    continue
                known = examples.get(inside)
                if not isinstance(known, torch.Tensor) or storages[_memory(known)] > 1 or roots[inside] > 1:
                    return True
    return False


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            yield from (one for one in pytree.tree_leaves(value) if isinstance(one, fx.Node))


def _memory(value: torch.Tensor) -> int:
    try:
        return int(StorageWeakRef(value.untyped_storage()).cdata)
    except NotImplementedError:  # a subclass without memory of its own
        return id(value)


def _root(node: fx.Node) -> fx.Node:
    """The tensor whose memory a node shows."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def _sizes(one: _Stretch, known: dict[Any, fx.Node]) -> list[fx.Node] | None:
    """The graph's inputs for the sizes in a stretch that are no inputs of it; None where nothing says what one is."""
    given = {_symbol(node) for node in one.inputs}
    symbols = set[Any]().union(*(free_symbols(value) for value in _values((*one.inputs, *one.steps)))) - given
    tensors = (node.meta["val"] for node in one.inputs if isinstance(node.meta["val"], torch.Tensor))
    said = {_expression(size) for value in tensors for size in value.shape}
    return [known[s] for s in sorted(symbols & known.keys(), key=str)] if symbols <= known.keys() | said else None


def _symbol(node: fx.Node) -> Any:
    """The symbol that an input or a value is, if it is a number of that kind."""
    expression = _expression(node.meta.get("val"))
    return expression if getattr(expression, "is_symbol", False) else None


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _values(nodes: Sequence[fx.Node]) -> Iterator[Any]:
    """Tensors and symbolic numbers among the values of nodes."""
    for value in pytree.tree_leaves([node.meta.get("val") for node in nodes]):
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value


def _graph_module(one: _Stretch, given: Sequence[fx.Node]) -> fx.GraphModule:
    """A stretch as a graph of its own."""
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for node in given:
        inside[node] = placeholder = graph.placeholder(node.name)
        placeholder.meta["val"] = node.meta["val"]
    for node in one.steps:
        inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[one.steps[place]] for place in one.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
