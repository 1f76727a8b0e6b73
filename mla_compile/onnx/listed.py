"""``ListedAttention`` as a function: gather the rows of the listed keys, then run ``DecodeAttention`` over these rows.

Each query has its own rows, so the query axis is merged into the batch axis:

    query [B,S,H,W] -> [B*S,1,H,W];  latent [B,C,La] -> [B*S,k,La];  mask [B|1,H|1,S|1,T] -> [B*S,H|1,1,k]

Conditions on positions are written into the new mask. The mask also hides entries that name no key. For such entries,
the first row is gathered.

If there are only k keys, a list of the best k usually names all keys. The attention then reads the rows in place
instead of gathering them. An ``If`` decides this in every call. (ONNX Runtime 1.32 loses the overload if a function
calls another function outside of such a branch.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import AttributeProto, TensorProto, helper

from mla_compile.onnx.function import Signature, defined
from mla_compile.onnx.op import DOMAIN, LISTED, LISTED_INPUTS, NAME
from mla_compile.onnx.writer import Writer


@dataclass(frozen=True)
class ListedSignature:
    """The properties that determine the body.

    ``whole``: the signature of the same attention over all keys. ``every``: whether each entry of the list is known to
    name a key.
    """

    whole: Signature
    every: bool = False

    @property
    def gathered(self) -> Signature:
        """The signature of the attention over the gathered rows."""
        whole = self.whole
        mask = TensorProto.BOOL if whole.mask is None else whole.mask
        return replace(whole, mask=mask, trimmed=False, seq_lens=False, causal=False, window=False)


def listed_function(
    signature: ListedSignature, overloads: tuple[str, str], opset: int, overload: str = ""
) -> onnx.FunctionProto:
    """Return the function. ``overloads`` of ``DecodeAttention``: first for all keys, then for the gathered rows."""
    whole = signature.whole
    body, every, chosen = Writer(), Writer("all."), _Chosen(signature)
    every.nodes.append(_attention(whole, {}, [f"all.{name}" for name in whole.outputs], overloads[0]))
    chosen.attention(overloads[1])
    dtypes = {"out": whole.query_dtype, "lse": TensorProto.FLOAT}
    branches = {
        name: writer.graph(name, {f"{prefix}.{output}": dtypes[output] for output in whole.outputs})
        for name, writer, prefix in (("then_branch", every, "all"), ("else_branch", chosen, "listed"))
    }
    # If every entry is known to name a key, the condition depends only on sizes. No runtime then has to wait for the
    # device.
    keys = body.keys(masked=whole.mask is not None)
    full = body.op("Squeeze", body.op("Equal", body.size("indices", 2), keys))
    if not signature.every:
        _, named = body.named(keys)
        each = body.op("ReduceMin", body.op("Cast", named, to=TensorProto.INT32), keepdims=0)
        full = body.op("And", full, body.op("Cast", each, to=TensorProto.BOOL))
    body.nodes.append(helper.make_node("If", [full], list(whole.outputs), name="If.full", **branches))
    return defined(LISTED, LISTED_INPUTS, whole, body, opset, overload)


def _attention(
    signature: Signature, values: Mapping[str, str], outputs: Sequence[str], overload: str
) -> onnx.NodeProto:
    """Return a ``DecodeAttention`` node. ``values``: input -> the value that the node reads instead of this input."""
    inputs = [values.get(name, name) if name in signature.given else "" for name in signature.inputs]
    node = helper.make_node(NAME, inputs, outputs, name=f"{NAME}.{outputs[0]}", domain=DOMAIN)
    read = {"scale": AttributeProto.FLOAT, "softcap": AttributeProto.FLOAT, "window": AttributeProto.INT}
    for name, kind in read.items():
        if name == "scale" or getattr(signature, name):
            node.attribute.append(AttributeProto(name=name, type=kind, ref_attr_name=name))
    numbers = {"causal": int(signature.causal), "value_width": signature.value_width}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in numbers.items() if value)
    node.overload = overload
    return node


class _Chosen(Writer):
    """The branch that gathers the listed rows."""

    def __init__(self, signature: ListedSignature) -> None:
        super().__init__("listed.")
        self.whole, self.gathered = signature.whole, signature.gathered

    def attention(self, overload: str) -> None:
        """Add the nodes. ``overload``: the overload of ``DecodeAttention`` for the gathered rows."""
        whole, keys, count = self.whole, self.keys(masked=self.whole.mask is not None), self.size("indices", 2)
        at, named = self.named(keys)
        at = self.op("Where", named, at, self.scalar(0))
        seen = self.shaped(self.both([named, *self._positions(at, keys)]), -1, 1, 1, count)
        batch = self.counted(self.size("indices", 0))
        first = self.op("Mul", batch, self.size("latent", 1))
        flat = self.shaped(self.op("Add", at, self.shaped(first, -1, 1, 1)), -1, count)
        given = {
            "query": self.shaped("query", -1, 1, self.size("query", 2, 4)),
            "mask": seen if whole.mask is None else self._mask(at, seen, batch, keys, count),
        }
        widths = {"latent": whole.La, "rope": whole.Lb, "values": self.size("values", 2) if whole.values else 0}
        for name, width in widths.items():
            if width:
                given[name] = self.op("Gather", self.shaped(name, -1, width), flat, axis=0)
        outputs = [f"of_rows.{name}" for name in whole.outputs]
        self.nodes.append(_attention(self.gathered, given, outputs, overload))
        heads = self.size("query", 0, 3)
        self.result(self.shaped("of_rows.out", heads, -1), "listed.out")
        if whole.lse:
            self.result(self.shaped("of_rows.lse", heads), "listed.lse")

    def _positions(self, at: str, keys: str) -> list[str]:
        """Return conditions under which a query sees the key ``at`` [B,S,k]: by length, causality and window."""
        whole, conditions = self.whole, []
        length = self.shaped("seq_lens", -1, 1, 1) if whole.seq_lens else keys
        if whole.seq_lens:
            conditions.append(self.op("Less", at, length))
        if whole.causal or whole.window:
            queries = self.size("query", 1)
            own = self.shaped(self.counted(queries), 1, -1, 1)
            newest = self.op("Add", self.op("Sub", length, queries), own)
            if whole.causal:
                conditions.append(self.op("LessOrEqual", at, newest))
            if whole.window:
                oldest = self.op("Sub", newest, self.attribute("window", AttributeProto.INT))
                conditions.append(self.op("Greater", at, oldest))
        return conditions

    def _mask(self, at: str, seen: str, batch: str, keys: str, count: str) -> str:
        """Return the mask at the listed keys, [B*S,H|1,1,k]. It is False or -inf where ``seen`` is False.

        The B, H and S axes of the given mask may have size 1.
        """
        sizes = [self.size("mask", axis) for axis in range(3)]
        rows = self.op("Mod", self.shaped(batch, -1, 1, 1, 1), sizes[0])
        heads = self.shaped(self.counted(sizes[1]), 1, 1, -1, 1)
        queries = self.op("Mod", self.shaped(self.counted(self.size("query", 1)), 1, -1, 1, 1), sizes[2])
        row = self.op("Add", self.op("Mul", self.op("Add", self.op("Mul", rows, sizes[1]), heads), sizes[2]), queries)
        place = self.op("Add", self.op("Mul", row, keys), self.op("Unsqueeze", at, self.ints(2)))
        mask = self.op("Gather", self.shaped("mask", -1), place, axis=0)  # [B,S,H|1,k]
        mask = self.shaped(mask, -1, sizes[1], 1, count)
        if self.whole.mask == TensorProto.BOOL:
            return self.op("And", mask, seen)
        return self.op("Where", seen, mask, self.op("CastLike", self.number(float("-inf")), mask))
