"""``DecodeAttention`` as a function of standard operators. Every file contains it, so that any runtime can run it.

The body computes scores, a softmax in float32 and a weighted sum. The heads are folded into rows: [B,S*H,W] x [B,W,T].
The cache is therefore read in place, without a copy per head. On a CPU, this is the fastest form that MatMul and
Softmax allow (docs/decisions/075). A function cannot test which inputs are given, so each combination of inputs gets
its own body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from mla_compile.onnx.op import DOMAIN, INPUTS, NAME, VERSION
from mla_compile.onnx.writer import Writer

_FLOAT = TensorProto.FLOAT
_LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class Signature:
    """The properties that determine the body: the given inputs, their ONNX dtypes and widths, and the features in use.

    ``trimmed``: whether the cache may have more rows than the mask has columns. The additional rows are unused.
    """

    query_dtype: int
    dtype: int
    La: int
    Lb: int
    mask: int | None = None
    trimmed: bool = False
    seq_lens: bool = False
    sinks: bool = False
    values: bool = False
    causal: bool = False
    softcap: bool = False
    window: bool = False
    value_width: int = 0
    lse: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The inputs that are given."""
        given = {"query": True, "latent": True, "rope": self.Lb > 0, "mask": self.mask is not None}
        given |= {"seq_lens": self.seq_lens, "sinks": self.sinks, "values": self.values}
        return tuple(name for name in INPUTS if given[name])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The formal inputs, up to the last given input."""
        return INPUTS[: INPUTS.index(self.given[-1]) + 1]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The formal outputs."""
        return ("out", "lse") if self.lse else ("out",)


def function(signature: Signature, opset: int, overload: str = "") -> onnx.FunctionProto:
    """Return the function for one signature, in the standard operators of ``opset`` (13 or later)."""
    body = _Body(signature)
    body.attention()
    return defined(NAME, signature.inputs, signature, body, opset, overload)


def defined(
    name: str, inputs: Sequence[str], signature: Signature, body: Writer, opset: int, overload: str
) -> onnx.FunctionProto:
    """Wrap ``body`` as a function that has all attributes of the operator."""
    read = ["scale", *(n for n in ("softcap", "window") if getattr(signature, n))]
    # The other attributes are accepted but not read: ``signature`` fixes their values.
    others = {"causal": 0, "value_width": 0, "softcap": 0.0, "window": 0}
    return body.function(
        name, inputs, signature.outputs, opset, overload, read=read,
        ignored={n: value for n, value in others.items() if n not in read},
        imports=[] if name == NAME else [helper.make_opsetid(DOMAIN, VERSION)],
        doc="Decode attention over one shared row per token; see the model's metadata.",
    )  # fmt: skip


class _Body(Writer):
    """The attention for one signature."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.s = signature

    def attention(self) -> None:
        s = self.s
        query = self.op("Mul", self.wide("query", s.query_dtype), self.attribute("scale", onnx.AttributeProto.FLOAT))
        flat = self.op("Reshape", query, self.ints(0, -1, s.La + s.Lb))
        latent = self.rows("latent")
        rope = self.rows("rope") if s.Lb else ""
        parts = [(flat, latent)]
        if s.Lb:
            self.nodes.append(
                helper.make_node("Split", [flat, self.ints(s.La, s.Lb)], ["q0", "q1"], name="Split.query", axis=2)
            )
            parts = [("q0", latent), ("q1", rope)]
        products = [self.op("MatMul", q, self.op("Transpose", rows, perm=[0, 2, 1])) for q, rows in parts]
        folded = products[0] if len(products) == 1 else self.op("Add", *products)  # [B,S*H,T]
        heads = self.op("Shape", "query", start=0, end=3)
        scores = folded
        hidden = s.mask is not None or s.seq_lens or s.causal or s.window
        if hidden or s.softcap or s.sinks or s.lse:
            scores = self.op("Reshape", folded, self.op("Concat", heads, self.ints(-1), axis=0))  # [B,S,H,T]
        if s.softcap:
            cap = self.attribute("softcap", onnx.AttributeProto.FLOAT)
            scores = self.op("Mul", cap, self.op("Tanh", self.op("Div", scores, cap)))
        allowed = self.allowed(scores) if hidden else ""
        if s.mask is not None and s.mask != TensorProto.BOOL:
            added = self.op("Transpose", self.wide("mask", s.mask), perm=[0, 2, 1, 3])
            # Minus infinity in the mask is clamped, because adding a score to it could give NaN. `allowed` hides these
            # keys.
            scores = self.op("Add", scores, self.op("Max", added, self.number(_LOWEST)))
        if allowed:
            scores = self.op("Where", allowed, scores, self.number(_LOWEST))
        probabilities = self.softmax(scores)
        if allowed:  # a query that sees no key gets zeros, whatever values the rows hold
            some = self.op(
                "Cast", self.op("ReduceMax", self.op("Cast", allowed, to=_FLOAT), self.ints(-1)), to=TensorProto.BOOL
            )
            probabilities = self.op("Where", some, probabilities, self.number(0.0))
            if s.lse:
                self.log_sum(scores, some)
        elif s.lse:
            self.log_sum(scores, "")
        if scores != folded:
            probabilities = self.op("Reshape", probabilities, self.op("Shape", folded))
        summed = self.summed(probabilities, latent, rope)
        out = self.op("Reshape", summed, self.op("Concat", heads, self.ints(-1), axis=0))
        self.result(out, "out", s.query_dtype)

    def rows(self, name: str) -> str:
        """Return the used rows of a cache, in float32."""
        if self.s.trimmed:
            used = self.op("Slice", name, self.ints(0), self.op("Shape", "mask", start=3, end=4), self.ints(1))
            return self.wide(used, self.s.dtype)
        return self.wide(name, self.s.dtype)

    def allowed(self, scores: str) -> str:
        """Return a boolean value that is True where a query sees a key. It broadcasts against scores [B,S,H,T]."""
        s, conditions = self.s, []
        if s.mask == TensorProto.BOOL:
            conditions.append(self.op("Transpose", "mask", perm=[0, 2, 1, 3]))
        elif s.mask is not None:
            unbounded = self.op("IsInf", self.wide("mask", s.mask), detect_positive=0)
            conditions.append(self.op("Transpose", self.op("Not", unbounded), perm=[0, 2, 1, 3]))
        if s.seq_lens or s.causal or s.window:
            keys, length = self.positions(scores)
            if s.seq_lens:
                conditions.append(self.op("Less", keys, length))
            if s.causal or s.window:
                newest = self.newest(length)
                if s.causal:
                    conditions.append(self.op("LessOrEqual", keys, newest))
                if s.window:
                    oldest = self.op("Sub", newest, self.attribute("window", onnx.AttributeProto.INT))
                    conditions.append(self.op("Greater", keys, oldest))
        return self.both(conditions)

    def positions(self, scores: str) -> tuple[str, str]:
        """Return the indices of the keys [T], and the number of keys as [B,1,1,1] or [1]."""
        keys = self.op("Shape", scores, start=3, end=4)
        indices = self.counted(keys)
        if self.s.seq_lens:
            return indices, self.op("Reshape", "seq_lens", self.ints(-1, 1, 1, 1))
        return indices, keys

    def newest(self, length: str) -> str:
        """Return the index of the last key that query s sees under ``causal``: length - S + s, as [B or 1,S,1,1]."""
        count = self.op("Shape", "query", start=1, end=2)
        own = self.counted(count)
        return self.op("Add", self.op("Sub", length, count), self.op("Reshape", own, self.ints(1, -1, 1, 1)))

    def softmax(self, scores: str) -> str:
        if not self.s.sinks:
            return self.op("Softmax", scores, axis=-1)
        heads = self.op("Shape", scores, start=0, end=3)
        column = self.op("Reshape", "sinks", self.ints(1, 1, -1, 1))
        shape = self.op("Concat", heads, self.ints(1), axis=0)
        column = self.op("Expand", column, shape)
        both = self.op("Softmax", self.op("Concat", scores, column, axis=-1), axis=-1)
        return self.slice(both, 0, -1, 3)

    def log_sum(self, scores: str, some: str) -> None:
        total = self.op("ReduceLogSumExp", scores, self.ints(-1), keepdims=0)
        if some:
            nothing = self.op("Squeeze", some, self.ints(-1))
            total = self.op("Where", nothing, total, self.number(float("-inf")))
        self.result(total, "lse")

    def summed(self, probabilities: str, latent: str, rope: str) -> str:
        s = self.s
        if s.values:
            return self.op("MatMul", probabilities, self.rows("values"))
        if not s.value_width or s.value_width == s.La:
            return self.op("MatMul", probabilities, latent)
        if s.value_width < s.La:
            return self.op("MatMul", probabilities, self.slice(latent, 0, s.value_width, 2))
        second = self.slice(self.op("MatMul", probabilities, rope), 0, s.value_width - s.La, 2)
        return self.op("Concat", self.op("MatMul", probabilities, latent), second, axis=2)


__all__ = ["DOMAIN", "NAME", "VERSION", "Signature", "defined", "function"]
