"""Makes a graph functional layer by layer. Each kind of repeated stretch is traced once, and the trace is copied.

A trace takes milliseconds per operator, and a model has only two or three kinds of layers. Equal calls on equal inputs
give equal traces with equal guards. :func:`mla_compile.repeats.find.form` defines equality, which includes dtypes,
sizes with their symbols, and places in memory.

Because stretches are traced separately, later stretches do not see a write. They receive the new value instead. This
works only if the written tensor is an input of the graph, and shares no memory with other values that are passed
between stretches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import _COPY_META_FIELDS

from mla_compile.capture.functional import Functional, fake_inputs, traced_once
from mla_compile.core.alike import known_of
from mla_compile.core.program import copy_graph, graph_module, results_of
from mla_compile.repeats.stretches import Stretch, alone, is_closed, memory_of, stretches

_LABELS = ("stack_trace", *_COPY_META_FIELDS)
"""The labels that a trace copies from the node that it runs."""


@dataclass(frozen=True)
class _Piece:
    """The trace of a kind of stretch.

    ``origins`` maps a node of the trace to the traced call, given by the call's position in the stretch.
    """

    traced: Functional
    origins: dict[fx.Node, int]


def traced_by_kind(gm: fx.GraphModule, values: Sequence[object]) -> Functional | None:
    """Return the functional graph of ``gm`` for ``values``, one per placeholder. Trace each kind of stretch once.

    ``gm`` comes from Dynamo or ``torch.export``, and has ``meta["example_value"]`` or ``meta["val"]`` on every call.
    Returns None if nothing repeats, or if a trace of the whole graph might give a different result. Raises whatever an
    operator raises.
    """
    given = fake_inputs(gm, values)
    if given is None or gm.graph.find_nodes(op="call_module"):
        return None
    graph = copy_graph(gm.graph)
    places = {name: place for place, name in enumerate(given.state)}
    inputs = dict(zip(graph.find_nodes(op="placeholder"), range(len(places), len(given.fakes)), strict=True))
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in places:
            return None  # a nested graph
        inputs[node] = places[str(node.target)]
    for node in graph.nodes:
        seen = node.meta.get("example_value", node.meta.get("val"))
        node.meta["val"] = given.fakes[inputs[node]] if node in inputs else seen
    sizes = _sizes(graph, inputs)
    found = stretches(graph, {*inputs, *sizes})
    if found is None or not all(is_closed(one) for one in found):
        return None
    copied = _Unrolled(given.fakes, inputs, sizes, found)
    pieces: dict[Hashable, _Piece] = {}
    for one in found:
        if one.kind not in pieces:
            try:
                piece = _traced(one)
            except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
                piece = None  # the value may be known in a trace of the whole graph
            if piece is None:
                return None
            pieces[one.kind] = piece
        if not copied.add(one, pieces[one.kind]):
            return None
    return copied.functional(graph.output_node())


def _sizes(graph: fx.Graph, inputs: Container[fx.Node]) -> list[fx.Node]:
    """Return calls that compute sizes from input sizes. Dynamo may put a call in the first layer that needs a size."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        of_sizes = all(
            isinstance(n.meta["val"], torch.SymInt) and (n in inputs or n in found) for n in node.all_input_nodes
        )
        if node.op == "call_function" and isinstance(node.meta["val"], torch.SymInt) and of_sizes:
            found[node] = None
    return list(found)


def _traced(one: Stretch) -> _Piece | None:
    """Return the trace of a stretch, or None if a trace of the whole graph might differ in this stretch."""
    module = graph_module({}, alone(one, one.inputs))
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    places = {node.name: place for place, node in enumerate(calls)}
    traced = traced_once(module, [node.meta["val"] for node in one.inputs])
    if traced is None:
        return None
    results = results_of(traced.gm.graph)
    for place, result in zip(one.outputs, results[len(traced.written) :], strict=True):
        made = result.meta["val"] if isinstance(result, fx.Node) else result
        if known_of(made, begins=False) != known_of(one.steps[place].meta["val"], begins=False):
            return None  # later stretches were analysed with the value that the graph records
    origins: dict[fx.Node, int] = {}
    for node in traced.gm.graph.nodes:
        if node.meta.get("nn_module_stack") or "stack_trace" in node.meta:
            if not (sources := node.meta.get("from_node")) or sources[-1].name not in places:
                return None  # the node's module and source line would be lost
            origins[node] = places[sources[-1].name]
    return _Piece(traced, origins)


class _Unrolled:
    """Builds the functional graph from the traces of all stretches, in order."""

    def __init__(
        self, fakes: Sequence[object], inputs: dict[fx.Node, int], sizes: Sequence[fx.Node], found: Sequence[Stretch]
    ) -> None:
        self.graph = fx.Graph()
        self.inputs = inputs
        self.placeholders: list[fx.Node] = []
        for place, fake in enumerate(fakes):
            self.placeholders.append(self.graph.placeholder(f"arg{place}_1"))
            self.placeholders[-1].meta["val"] = fake
        self.values: dict[fx.Node, Any] = {node: self.placeholders[place] for node, place in inputs.items()}
        self.known = {node for node in self.placeholders if isinstance(node.meta["val"], torch.SymInt)}
        self.sizes: dict[object, fx.Node] = {}  # nodes of known sizes, by expression
        for node in sizes:
            self.values[node] = self._size(node, self.values)
        self.constants: dict[str, object] = {}
        self.names: dict[fx.Node, str] = {}
        self.written: dict[int, Any] = {}
        handed = {one.steps[place] for one in found for place in one.outputs}
        tensors = [node for node in handed if isinstance(node.meta["val"], Tensor)]
        self.memories = Counter(map(_memory, (*tensors, *inputs)))
        self.told = all(_memory(node) is not None for node in tensors)
        self.given = Counter(memory_of(fake) for fake in fakes if isinstance(fake, Tensor))

    def add(self, one: Stretch, piece: _Piece) -> bool:
        """Copy the trace of a stretch. Return False if another stretch would miss a write."""
        source = piece.traced.gm.graph
        inside = dict(zip(source.find_nodes(op="placeholder"), (self.values[node] for node in one.inputs), strict=True))
        for node in source.nodes:
            if node.op == "call_function":
                inside[node] = self._call(node, one, piece, inside)
            elif node.op == "get_attr":
                inside[node] = self._attribute(node, one, piece)
        results = results_of(source)
        new = [inside.get(value, value) if isinstance(value, fx.Node) else value for value in results]
        returned = Counter(_memory(one.steps[place]) for place in one.outputs)
        for place, value in zip(piece.traced.written, new, strict=False):
            node = one.inputs[place]
            # Results of this stretch show the write. Other values that share the memory would not show the write.
            if not self._is_alone(node, returned):
                return False
            self.values[node] = self.written[self.inputs[node]] = value
        for place, value in zip(one.outputs, new[len(piece.traced.written) :], strict=True):
            self.values[one.steps[place]] = value
        return True

    def _is_alone(self, node: fx.Node, returned: Counter[int | None]) -> bool:
        """Whether ``node`` is an input whose memory no other input and no result of another stretch uses."""
        memory = _memory(node)
        if node not in self.inputs or memory is None or not self.told:
            return False
        return self.given[memory_of(node.meta["val"])] == 1 and self.memories[memory] - returned[memory] == 1

    def _call(self, node: fx.Node, one: Stretch, piece: _Piece, inside: dict[fx.Node, Any]) -> fx.Node:
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._size(node, inside)
        return self._labelled(self.graph.node_copy(node, inside.__getitem__), node, one, piece)

    def _size(self, node: fx.Node, inside: dict[fx.Node, Any]) -> fx.Node:
        """Return the node of a size. Equal sizes that depend only on input sizes share a node, as in a whole trace."""
        size = node.meta["val"].node.expr
        known = all(inside[given] in self.known for given in node.all_input_nodes)
        if known and size in self.sizes:
            return self.sizes[size]
        copied = self.graph.create_node(
            "call_function", node.target, *fx.map_arg((node.args, node.kwargs), inside.__getitem__)
        )
        copied.meta["val"] = node.meta["val"]
        if known:
            self.sizes[size] = copied
            self.known.add(copied)
        return copied

    def _attribute(self, node: fx.Node, one: Stretch, piece: _Piece) -> fx.Node:
        name = self.names.setdefault(node, f"_constant_{len(self.names)}")
        self.constants[name] = getattr(piece.traced.gm, str(node.target))
        copied = self.graph.create_node("get_attr", name)
        copied.meta = dict(node.meta)
        return self._labelled(copied, node, one, piece)

    def _labelled(self, copied: fx.Node, node: fx.Node, one: Stretch, piece: _Piece) -> fx.Node:
        if node in piece.origins:
            origin = one.steps[piece.origins[node]].meta
            copied.meta.update((name, _as_traced(name, origin[name])) for name in _LABELS if name in origin)
        return copied

    def functional(self, output: fx.Node) -> Functional:
        places = sorted(self.written)
        returned: Any = fx.map_arg(output.args[0], self.values.__getitem__)
        self.graph.output((*(self.written[place] for place in places), *returned))
        self.graph.eliminate_dead_code()
        return Functional(graph_module(self.constants, self.graph), tuple(places), 0)


def _memory(node: fx.Node) -> int | None:
    """Return a key of the memory of a tensor that Dynamo saw. A view and its base have the same key.

    Return None for an exported program, whose values may have been serialised and loaded again.
    """
    seen = node.meta.get("example_value")
    return memory_of(seen) if isinstance(seen, Tensor) else None


def _as_traced(name: str, value: Any) -> object:
    """Return a label of a node in the form that a trace writes, with names in place of module classes."""
    if name != "nn_module_stack":
        return value
    return {
        key: (path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)
        for key, (path, kind) in value.items()
    }
