"""The ONNX functions ``IndexScores``, for the scores of keys, and ``WeighAlike``, for queries that see no chosen key.

``IndexScores`` folds the heads of the queries into rows. It multiplies queries and keys ([B,S*J,D] x [B,D,T], as in
``DecodeAttention``), then the result and the weights. This is 1.6 times as fast as one product per head
(docs/decisions/076).

``WeighAlike`` reads the cache only in one branch of an ``If``, which few calls take.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import AttributeProto, TensorProto, helper

from mla_compile.onnx.op import ALIKE, ALIKE_INPUTS, INDEX, INDEX_INPUTS
from mla_compile.onnx.writer import Writer

_FLOAT, _DOUBLE, _INT32 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32


@dataclass(frozen=True)
class IndexScoresSignature:
    """The properties that determine the body of ``IndexScores``.

    ``wide``: the dtype of the products, which is float64 for float64 keys and otherwise float32.
    """

    width: int
    wide: int


@dataclass(frozen=True)
class Alike:
    """The properties that determine the body of ``WeighAlike``.

    ``dtype`` and ``mask``: the dtypes of out and mask. ``used``: whether the input ``used`` is given.
    """

    dtype: int
    mask: int | None
    used: bool


def index_function(signature: IndexScoresSignature, opset: int, overload: str = "") -> onnx.FunctionProto:
    """Return a function that computes ``sum_j weights_j relu(scale * q_j . k_t)``."""
    body = Writer()
    query, keys, weights = (body.op("Cast", name, to=signature.wide) for name in INDEX_INPUTS)
    scale = body.op("CastLike", body.attribute("scale", AttributeProto.FLOAT), query)
    rows = body.op("Reshape", body.op("Mul", query, scale), body.ints(0, -1, signature.width))
    products = body.op("Relu", body.op("MatMul", rows, body.op("Transpose", keys, perm=[0, 2, 1])))
    products = body.shaped(products, body.size("query", 0, 3), -1)  # [B,S,J,T]
    two = body.ints(2)
    body.result(body.op("Squeeze", body.op("MatMul", body.op("Unsqueeze", weights, two), products), two), "scores")
    return body.function(INDEX, INDEX_INPUTS, ["scores"], opset, overload, read=["scale"], ignored={})


def alike_function(signature: Alike, opset: int, overload: str = "") -> onnx.FunctionProto:
    """Return a function that computes the formulas of :mod:`mla_compile.kernels.alike`."""
    body = Writer()
    hidden = body.op("LessOrEqual", "lse", body.attribute("lowest", AttributeProto.FLOAT))
    found = body.op("ReduceMax", body.op("Cast", hidden, to=_INT32), keepdims=0)
    one, none = _Mean(signature), Writer("none.")
    one.weighed(hidden)
    none.result("out", "none.out")
    branches = {
        "then_branch": one.graph("some_hidden", {"mean.out": signature.dtype}),
        "else_branch": none.graph("none_hidden", {"none.out": signature.dtype}),
    }
    body.nodes.append(
        helper.make_node("If", [body.op("Cast", found, to=TensorProto.BOOL)], ["weighed"], name="If.hidden", **branches)
    )
    read, others = (["lowest"], {"fill": 0.0}) if signature.mask is None else (["lowest", "fill"], {})
    given = 6 if signature.used else 3 if signature.mask is None else 5
    return body.function(ALIKE, ALIKE_INPUTS[:given], ["weighed"], opset, overload, read=read, ignored=others)


class _Mean(Writer):
    """The branch of ``WeighAlike`` that computes the mean of rows."""

    def __init__(self, signature: Alike) -> None:
        super().__init__("mean.")
        self.s = signature

    def weighed(self, hidden: str) -> None:
        """Add the result of the branch. ``hidden`` [B,S,H] is a value of the surrounding function."""
        rows = "values"
        if self.s.used:
            rows = self.op("Slice", rows, self.ints(0), "used", self.ints(1))
        rows = self.op("Cast", rows, to=_FLOAT)
        if self.s.mask is None:
            mean = self.op("Unsqueeze", self.op("ReduceMean", rows, self.ints(1)), self.ints(1))
        else:
            mean = self._greatest(rows)
        last = self.op("Unsqueeze", hidden, self.ints(-1))
        self.result(self.op("Where", last, self.op("CastLike", mean, "out"), "out"), "mean.out")

    def _greatest(self, rows: str) -> str:
        """Return the mean [B,S,H|1,Lv] of the rows at which the mask has its maximum."""
        wide = _DOUBLE if self.s.mask == _DOUBLE else _FLOAT
        heads, keys = self.size("mask", 1), self.size("mask", 3)
        batch, count = self.size("indices", 0), self.size("indices", 1)
        fill = self.op("Cast", self.attribute("fill", AttributeProto.FLOAT), to=wide)
        each = self.joined(batch, heads, count)
        given = self.op("Expand", self.op("Cast", "mask", to=wide), self.joined(each, keys))
        before = self.op("Expand", fill, self.joined(each, 1))  # an extra first column, for entries that name no key
        at, named = self.named(keys)
        at = self.op("Where", named, self.op("Add", at, self.scalar(1)), self.scalar(0))
        at = self.op("Expand", self.op("Unsqueeze", at, self.ints(1)), self.joined(each, self.size("indices", 2)))
        listed = self.op("GatherElements", self.op("Concat", before, given, axis=3), at, axis=3)
        others = self.op("Expand", fill, self.joined(each, self.op("Add", keys, self.ints(1))))
        numbers = self.op("ScatterElements", others, at, listed, axis=3)
        numbers = self.op("Slice", numbers, self.ints(1), self.op("Add", keys, self.ints(1)), self.ints(3))
        top = self.op("Equal", numbers, self.op("ReduceMax", numbers, self.ints(-1)))
        weights = self.op("Cast", top, to=_FLOAT)  # [B,H|1,S,T]
        total = self.op("MatMul", self.shaped(weights, batch, -1, keys), rows)
        total = self.shaped(total, each, -1)
        share = self.op("Div", total, self.op("ReduceSum", weights, self.ints(-1)))
        return self.op("Transpose", share, perm=[0, 2, 1, 3])
