"""Attach an ONNX function to each call of this library's operators.

An operator that is called with several signatures gets overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import onnx
import onnx_ir as ir

from mla_compile.onnx.choosing import Alike, IndexScoresSignature, alike_function, index_function
from mla_compile.onnx.function import Signature, function
from mla_compile.onnx.listed import ListedSignature, listed_function
from mla_compile.onnx.op import ALIKE, DOMAIN, INDEX, LISTED, NAME, VERSION


def attach_functions(model: ir.Model) -> None:
    """Add a function for each signature of an operator in the model."""
    functions = _Functions(model)
    found = [node for node in model.graph if node.domain == DOMAIN]
    for node in found:
        node.overload = functions.of(node)
    if found:
        model.opset_imports[DOMAIN] = VERSION


class _Functions:
    """The functions that were added to a model so far."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.opset = model.opset_imports[""]
        self.overloads: dict[str, dict[Hashable, str]] = {}

    def of(self, node: ir.Node) -> str:
        """Return the overload of the function that a node calls. If the model lacks the function, add it."""
        if node.op_type == INDEX:
            return self._overload(INDEX, _scores(node), index_function)
        if node.op_type == ALIKE:
            return self._overload(ALIKE, _alike(node), alike_function)
        whole = signature(node)
        if node.op_type == NAME:
            return self._overload(NAME, whole, function)
        listed = ListedSignature(whole, _is_ranked(node.inputs[7]))
        inner = (self._overload(NAME, whole, function), self._overload(NAME, listed.gathered, function))
        return self._overload(LISTED, listed, lambda *rest: listed_function(rest[0], inner, *rest[1:]))

    def _overload(self, name: str, key: object, write: Callable[..., onnx.FunctionProto]) -> str:
        known = self.overloads.setdefault(name, {})
        if key not in known:
            known[key] = f"v{len(known)}" if known else ""
            added = ir.from_proto(write(key, self.opset, known[key]))
            self.model.functions[added.identifier()] = added
        return known[key]


def _is_ranked(indices: ir.Value | None) -> bool:
    """Whether indices [B,S,k] come from a ``TopK`` along the last axis, so that no query has an index twice."""
    node = None if indices is None else indices.producer()
    while node is not None and node.op_type in ("Cast", "Identity"):
        indices = node.inputs[0]
        node = None if indices is None else indices.producer()
    if node is None or node.op_type != "TopK" or indices is not node.outputs[1]:
        return False
    axis = node.attributes.get("axis")
    return axis is None or axis.as_int() in (-1, 2)


def _width(value: ir.Value | None) -> int:
    if value is None:
        return 0
    assert value.shape is not None
    return int(value.shape[len(value.shape) - 1])


def _scores(node: ir.Node) -> IndexScoresSignature:
    query, keys = node.inputs[:2]
    wide = onnx.TensorProto.DOUBLE if keys is not None and keys.dtype == ir.DataType.DOUBLE else onnx.TensorProto.FLOAT
    return IndexScoresSignature(_width(query), wide)


def _alike(node: ir.Node) -> Alike:
    out, _, _, mask, _, used = [*node.inputs, *[None] * 6][:6]
    assert out is not None
    return Alike(int(out.dtype or 1), None if mask is None else int(mask.dtype or 1), used is not None)


def signature(node: ir.Node) -> Signature:
    """Return the properties of a node that determine its function's body."""
    given = [*node.inputs, *[None] * 7][:7]
    query, latent, rope, mask, seq_lens, sinks, values = given
    assert query is not None
    assert latent is not None

    def attribute(name: str) -> float:
        found = node.attributes.get(name)
        return 0.0 if found is None else float(found.value)

    producer = latent.producer()
    return Signature(
        query_dtype=int(query.dtype or latent.dtype or 1),
        dtype=int(latent.dtype or 1),
        La=_width(latent),
        Lb=_width(rope),
        mask=None if mask is None else int(mask.dtype or 9),
        trimmed=producer is not None and producer.op_type == "TensorScatter",
        seq_lens=seq_lens is not None,
        sinks=sinks is not None,
        values=values is not None,
        causal=bool(attribute("causal")),
        softcap=attribute("softcap") > 0,
        window=attribute("window") > 0,
        value_width=int(attribute("value_width")),
        lse=len(node.outputs) > 1,
    )
