"""Write the nodes of an ONNX function, or of a branch in a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import AttributeProto, TensorProto, helper

from mla_compile.onnx.op import DOMAIN

_FLOAT = TensorProto.FLOAT


class Writer:
    """Collects nodes. A method that adds a node returns the name of the node's value. :meth:`result` receives the name.

    ``prefix`` keeps names in a branch distinct from outer names, which the branch may read.
    """

    def __init__(self, prefix: str = "v") -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []

    def _name(self) -> str:
        return f"{self.prefix}{len(self.nodes)}"

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Add a standard operator and return the name of its only output."""
        name = self._name()
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"{kind}.{name}", **attributes))
        return name

    def result(self, value: str, name: str, to: int | None = None) -> None:
        """Make ``value`` the output called ``name``. If ``to`` is given, cast it to this dtype."""
        kind, attributes = ("Identity", {}) if to is None else ("Cast", {"to": to})
        self.nodes.append(helper.make_node(kind, [value], [name], name=f"{kind}.{name}", **attributes))

    def ints(self, *values: int) -> str:
        """Add a constant vector of int64."""
        return self.op("Constant", value=helper.make_tensor("", TensorProto.INT64, [len(values)], values))

    def scalar(self, value: int) -> str:
        """Add a constant int64."""
        return self.op("Constant", value=helper.make_tensor("", TensorProto.INT64, [], [value]))

    def number(self, value: float, dtype: int = _FLOAT) -> str:
        """Add a constant floating-point number."""
        return self.op("Constant", value=helper.make_tensor("", dtype, [], [value]))

    def attribute(self, name: str, kind: AttributeProto.AttributeType) -> str:
        """Add a constant with the value of one of the function's attributes."""
        field = {AttributeProto.FLOAT: "value_float", AttributeProto.INT: "value_int"}[kind]
        output = self._name()
        node = helper.make_node("Constant", [], [output])
        node.attribute.append(AttributeProto(name=field, type=kind, ref_attr_name=name))
        self.nodes.append(node)
        return output

    def wide(self, value: str, dtype: int) -> str:
        """Cast ``value``, which has ``dtype``, to float32."""
        return value if dtype == _FLOAT else self.op("Cast", value, to=_FLOAT)

    def slice(self, value: str, start: int, stop: int, axis: int) -> str:
        """Slice entries ``start`` to ``stop`` along one axis."""
        return self.op("Slice", value, self.ints(start), self.ints(stop), self.ints(axis))

    def size(self, value: str, start: int, end: int | None = None) -> str:
        """Return the sizes of axes ``start`` to ``end`` as a vector. If ``end`` is None, return one size."""
        return self.op("Shape", value, start=start, end=start + 1 if end is None else end)

    def keys(self, *, masked: bool) -> str:
        """Return an attention's number of keys T, as a vector with one element.

        If there is a mask, T is its number of columns, because caches may have more rows.
        """
        return self.size("mask", 3) if masked else self.size("latent", 1)

    def named(self, keys: str) -> tuple[str, str]:
        """Return the listed indices, int64 [B,S,k], and whether each names a key. ``keys``: the number of keys."""
        at = self.op("Cast", "indices", to=TensorProto.INT64)
        return at, self.both([self.op("GreaterOrEqual", at, self.scalar(0)), self.op("Less", at, keys)])

    def counted(self, size: str) -> str:
        """Return the numbers from 0 to size - 1. ``size`` is a vector with one element."""
        return self.op("Range", self.scalar(0), self.op("Squeeze", size, self.ints(0)), self.scalar(1))

    def shaped(self, value: str, *sizes: str | int) -> str:
        """Reshape ``value``. The sizes are numbers or names of vectors."""
        return self.op("Reshape", value, self.joined(*sizes))

    def joined(self, *sizes: str | int) -> str:
        """Concatenate sizes, which are numbers or names of vectors, to one vector."""
        parts = [self.ints(size) if isinstance(size, int) else size for size in sizes]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def both(self, conditions: Sequence[str]) -> str:
        """Combine one or more conditions with And."""
        held = conditions[0]
        for other in conditions[1:]:
            held = self.op("And", held, other)
        return held

    def function(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        overload: str,
        *,
        read: Sequence[str],
        ignored: Mapping[str, float],
        imports: Sequence[onnx.OperatorSetIdProto] = (),
        doc: str | None = None,
    ) -> onnx.FunctionProto:
        """Return the nodes as a function in mla_compile's domain.

        ``read``: the attributes that the nodes read. ``ignored``: attributes that are accepted but not read, with their
        defaults. ``imports``: the operator sets that the nodes use in addition to the standard set.
        """
        opsets = [helper.make_opsetid("", opset), *imports]
        made = helper.make_function(
            DOMAIN, name, inputs, outputs, self.nodes, opsets, attributes=list(read), doc_string=doc
        )
        made.attribute_proto.extend(helper.make_attribute(key, value) for key, value in ignored.items())
        if overload:
            made.overload = overload
        return made

    def graph(self, name: str, outputs: Mapping[str, int]) -> onnx.GraphProto:
        """Return the nodes as a branch. ``outputs``: the name of each output -> its dtype."""
        values = [helper.make_tensor_value_info(output, dtype, None) for output, dtype in outputs.items()]
        return helper.make_graph(self.nodes, name, [], values)
