"""Edits of ONNX graphs that several profiles use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


class Editor:
    """Adds nodes before an anchor node. The names of the nodes start with ``prefix``, which tells their purpose."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node, prefix: str) -> None:
        self.graph = graph
        self.anchor = anchor
        self.prefix = prefix
        self.count = 0

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        """Add a node and return its first output."""
        name = f"{self.prefix}/{kind}.{self.count}"
        self.count += 1
        node = ir.node(kind, list(inputs), attributes=attributes or None, domain=domain, name=name)
        node.outputs[0].name = name
        self.graph.insert_before(self.anchor, node)
        return node.outputs[0]

    def ints(self, *values: int) -> ir.Value:
        """Add a constant vector of int64."""
        return self.op("Constant", value=ir.tensor(np.array(values, dtype=np.int64)))

    def joined(self, parts: Sequence[ir.Value]) -> ir.Value:
        """Concatenate one or more vectors."""
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def slice(self, value: ir.Value, start: ir.Value, stop: ir.Value, axis: int) -> ir.Value:
        """Slice entries ``start`` to ``stop`` along one axis."""
        return self.op("Slice", value, start, stop, self.ints(axis))


def consumers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the nodes that read a value, each with the index of its input."""
    return [(use.node, use.idx) for use in value.uses()]


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """Return the axes of a Squeeze or Unsqueeze; ``None`` if they are not constant."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    tensor = constant(node.inputs[1])
    return None if tensor is None else tuple(int(a) for a in np.atleast_1d(tensor))


def shape_range(node: ir.Node, rank: int) -> tuple[int, int]:
    """Return the range of axes whose sizes a Shape node returns. The node's input has ``rank`` axes."""
    start, end = (
        node.attributes[name].as_int() if name in node.attributes else default
        for name, default in (("start", 0), ("end", rank))
    )
    return start % rank, end + rank if end < 0 else min(end, rank)


def constant(value: ir.Value) -> npt.NDArray[np.generic] | None:
    """Return the array in an initializer or a Constant node; ``None`` for any other value."""
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant":
        attribute = producer.attributes.get("value")
        if attribute is not None:
            tensor = attribute.as_tensor()
        elif "value_ints" in producer.attributes:
            return np.array(producer.attributes["value_ints"].as_ints())
        elif "value_int" in producer.attributes:
            return np.array(producer.attributes["value_int"].as_int())
    return None if tensor is None else tensor.numpy()


def replace_input(value: ir.Value, new: ir.Value, where: Sequence[tuple[ir.Node, int]]) -> None:
    """Redirect the given readers of ``value`` to ``new``."""
    for node, index in where:
        assert node.inputs[index] is value
        node.replace_input_with(index, new)


def remove_unread(graph: ir.Graph) -> None:
    """Remove nodes and initializers that nothing reads."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(v in outputs or v.uses() for v in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del graph.initializers[name]
