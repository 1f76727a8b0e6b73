"""Writes the nodes of an ONNX function, or of a branch in one, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

_FLOAT = TensorProto.FLOAT


class Writer:
    """Nodes so far; every method that adds one returns the name of its value.

    ``prefix`` keeps the names of a branch apart from those around it, which it may read.
    """

    def __init__(self, prefix: str = "v") -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []

    def _name(self) -> str:
        return f"{self.prefix}{len(self.nodes)}"

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The only output of a standard operator."""
        name = self._name()
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"{kind}.{name}", **attributes))
        return name

    def result(self, value: str, name: str, to: int | None = None) -> None:
        """Gives ``value`` the name of an output, in the dtype ``to`` where that is given."""
        kind, attributes = ("Identity", {}) if to is None else ("Cast", {"to": to})
        self.nodes.append(helper.make_node(kind, [value], [name], name=f"{kind}.{name}", **attributes))

    def ints(self, *values: int) -> str:
        """A constant vector of int64."""
        return self.op("Constant", value=helper.make_tensor("", TensorProto.INT64, [len(values)], values))

    def scalar(self, value: int) -> str:
        """A constant int64."""
        return self.op("Constant", value=helper.make_tensor("", TensorProto.INT64, [], [value]))

    def number(self, value: float, dtype: int = _FLOAT) -> str:
        """A constant floating number."""
        return self.op("Constant", value=helper.make_tensor("", dtype, [], [value]))

    def attribute(self, name: str, kind: AttributeProto.AttributeType) -> str:
        """The value of one of the function's attributes, as a constant."""
        field = {AttributeProto.FLOAT: "value_float", AttributeProto.INT: "value_int"}[kind]
        output = self._name()
        node = helper.make_node("Constant", [], [output])
        node.attribute.append(AttributeProto(name=field, type=kind, ref_attr_name=name))
        self.nodes.append(node)
        return output

    def wide(self, value: str, dtype: int) -> str:
        """In float32."""
        return value if dtype == _FLOAT else self.op("Cast", value, to=_FLOAT)

    def slice(self, value: str, start: int, stop: int, axis: int) -> str:
        """Entries ``start`` to ``stop`` along one axis."""
        return self.op("Slice", value, self.ints(start), self.ints(stop), self.ints(axis))

    def size(self, value: str, start: int, end: int | None = None) -> str:
        """The sizes of axes ``start`` to ``end`` (that axis alone), as a vector."""
        return self.op("Shape", value, start=start, end=start + 1 if end is None else end)

    def keys(self, *, masked: bool) -> str:
        """T of an attention, as a vector of one: a cache may have more rows than the mask has columns."""
        return self.size("mask", 3) if masked else self.size("latent", 1)

    def named(self, keys: str) -> tuple[str, str]:
        """Where a list says that keys are, int64 [B,S,k], and which of its entries name one of that many keys."""
        at = self.op("Cast", "indices", to=TensorProto.INT64)
        return at, self.both([self.op("GreaterOrEqual", at, self.scalar(0)), self.op("Less", at, keys)])

    def counted(self, size: str) -> str:
        """0, 1, ... below a size that is a vector of one."""
        return self.op("Range", self.scalar(0), self.op("Squeeze", size, self.ints(0)), self.scalar(1))

    def shaped(self, value: str, *sizes: str | int) -> str:
        """``value`` reshaped: numbers, and names of vectors."""
        return self.op("Reshape", value, self.joined(*sizes))

    def joined(self, *sizes: str | int) -> str:
        """A vector of sizes."""
        parts = [self.ints(size) if isinstance(size, int) else size for size in sizes]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def both(self, conditions: Sequence[str]) -> str:
        """Where all conditions, at least one, hold."""
        held = conditions[0]
        for other in conditions[1:]:
            held = self.op("And", held, other)
        return held

    def graph(self, name: str, outputs: Mapping[str, int]) -> onnx.GraphProto:
        """The nodes as a branch; ``outputs``: names and dtypes."""
        values = [helper.make_tensor_value_info(output, dtype, None) for output, dtype in outputs.items()]
        return helper.make_graph(self.nodes, name, [], values)
