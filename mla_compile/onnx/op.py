"""The ONNX operators of this library: their schemas, and how torch operators translate to them.

``mla_compile::DecodeAttention``. Inputs: query [B,S,H,La+Lb], latent [B,C,La], and optionally rope [B,C,Lb], mask (bool
or float) [B|1,H|1,S|1,T], seq_lens int64 [B], sinks float [H], values [B,C,Lv]. Outputs: out [B,S,H,Lv] in query's
dtype, and optionally the natural logarithm of the sum of exponentials, float [B,S,H]. If there is a mask, the size of
its last axis is T, and the last C - T rows of the cache are unused capacity. Otherwise, T = C. If ``value_width`` > 0,
the values are the first ``value_width`` columns of [latent, rope]. :mod:`mla_compile.kernels.reference` has the
formulas.

``mla_compile::ListedAttention`` has the same inputs, followed by indices int32 [B,S,k]: the keys that each query sees,
unless another argument hides them. A query's indices name no key twice. An index outside of the T keys names no key.
Masks, lengths, causality and windows refer to positions among all T keys.

``mla_compile::IndexScores``. Inputs: query [B,S,J,D], keys [B,T,D], weights [B,S,J]. Output: scores [B,S,T] in float32
(float64 for float64 keys), ``sum_j weights_j relu(scale * q_j . k_t)``.

``mla_compile::WeighAlike``. Inputs: out [B,S,H,Lv], lse [B,S,H], values [B,C,Lv], and optionally mask [B|1,H|1,S|1,T]
together with indices [B,S,k], and used int64 [1] (the number of rows of values in use). Output: ``out``, but each query
that saw no key (lse at most ``lowest``) gets a mean of rows (:mod:`mla_compile.kernels.alike`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnxscript import values as onnxscript_values

from mla_compile import ops
from mla_compile.onnx.manifest import OP_VERSION

DOMAIN = "mla_compile"
NAME = "DecodeAttention"
LISTED = "ListedAttention"
INDEX = "IndexScores"
ALIKE = "WeighAlike"
VERSION = OP_VERSION
INPUTS = ("query", "latent", "rope", "mask", "seq_lens", "sinks", "values")
LISTED_INPUTS = (*INPUTS, "indices")
INDEX_INPUTS = ("query", "keys", "weights")
ALIKE_INPUTS = ("out", "lse", "values", "mask", "indices", "used")

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_WHOLE = ["tensor(int32)", "tensor(int64)"]
_KINDS = {
    "query": "Q", "latent": "T", "rope": "T", "mask": "M", "seq_lens": "tensor(int64)", "sinks": "tensor(float)",
    "values": "T", "indices": "I",
}  # fmt: skip
_TYPES = {
    "Q": (_FLOATS, "query and result"),
    "T": (_FLOATS, "rows of the cache"),
    "M": ([*_FLOATS, "tensor(bool)"], "added to the scores, or True: attend"),
    "I": (_WHOLE, "places of keys"),
    "S": (["tensor(float)", "tensor(double)"], "scores"),
}


def schema(name: str = NAME) -> onnx.defs.OpSchema:
    """Return the schema of ``DecodeAttention`` or ``ListedAttention``. Queries may have a wider dtype than the rows."""
    names = LISTED_INPUTS if name == LISTED else INPUTS
    given = {n: _KINDS[n] for n in names}
    needed = ("query", "latent", "indices")
    types = [key for key in _TYPES if key in given.values()]
    numbers = {"causal": 0, "softcap": 0.0, "window": 0, "value_width": 0}
    return _schema(name, given, needed, {"out": "Q", "lse": "tensor(float)"}, types, ("scale",), numbers)


def _schema(
    name: str,
    inputs: Mapping[str, str],
    needed: Sequence[str],
    outputs: Mapping[str, str],
    types: Sequence[str],
    floats: Sequence[str],
    numbers: Mapping[str, float],
) -> onnx.defs.OpSchema:
    """Return a schema. ``floats``: required attributes. ``numbers``: optional attributes with their defaults."""
    parameter, option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
    attribute = onnx.defs.OpSchema.Attribute

    def described(kinds: Mapping[str, str], single: Sequence[str]) -> list[onnx.defs.OpSchema.FormalParameter]:
        return [
            parameter(key, kind, param_option=option.Single if key in single else option.Optional)
            for key, kind in kinds.items()
        ]

    return onnx.defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=described(inputs, needed),
        outputs=described(outputs, list(outputs)[:1]),
        type_constraints=[(key, *_TYPES[key]) for key in types],
        attributes=[
            *(attribute(key, onnx.defs.OpSchema.AttrType.FLOAT, required=True) for key in floats),
            *(attribute(key, onnx.helper.make_attribute(key, default)) for key, default in numbers.items()),
        ],
    )


def _index_schema() -> onnx.defs.OpSchema:
    kinds = {"query": "Q", "keys": "T", "weights": "M"}
    return _schema(INDEX, kinds, INDEX_INPUTS, {"scores": "S"}, ("Q", "T", "M", "S"), ("scale",), {})


def _alike_schema() -> onnx.defs.OpSchema:
    kinds = {
        "out": "Q", "lse": "tensor(float)", "values": "T", "mask": "M", "indices": "I", "used": "tensor(int64)"
    }  # fmt: skip
    return _schema(ALIKE, kinds, ALIKE_INPUTS[:3], {"weighed": "Q"}, ("Q", "T", "M", "I"), ("lowest",), {"fill": 0.0})


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ``custom_translation_table`` for ``torch.onnx.export``."""
    opset = onnxscript_values.Opset(DOMAIN, VERSION)
    dense, listed = (onnxscript_values.Op(opset, name, schema(name)) for name in (NAME, LISTED))
    scores = onnxscript_values.Op(opset, INDEX, _index_schema())
    alike = onnxscript_values.Op(opset, ALIKE, _alike_schema())

    def decode_attention(
        query: Any,
        latent: Any,
        rope: Any = None,
        values: Any = None,
        mask: Any = None,
        seq_lens: Any = None,
        sinks: Any = None,
        kv_scale: Any = None,
        indices: Any = None,
        *,
        scale: float,
        causal: bool = False,
        softcap: float = 0.0,
        window: int = 0,
        num_splits: int = 0,
        deterministic: bool = False,
    ) -> Any:
        assert kv_scale is None, "convert.py multiplies float8 rows by their scales"
        numbers: dict[str, Any] = {"scale": scale, "causal": int(causal), "softcap": softcap, "window": window}
        if indices is not None:
            return listed(query, latent, rope, mask, seq_lens, sinks, values, indices, **numbers)
        return dense(query, latent, rope, mask, seq_lens, sinks, values, **numbers)

    def index_scores(query: Any, keys: Any, weights: Any, scale: float) -> Any:
        return scores(query, keys, weights, scale=scale)

    def weigh_alike(
        out: Any, lse: Any, values: Any, lowest: float, mask: Any = None, indices: Any = None, fill: float = 0.0
    ) -> Any:
        return alike(out, lse, values, mask, indices, lowest=lowest, fill=fill)

    return {
        torch.ops.mla_compile.decode_attention.default: decode_attention,
        ops.decode_attention: decode_attention,
        torch.ops.mla_compile.index_scores.default: index_scores,
        torch.ops.mla_compile.weigh_alike.default: weigh_alike,
    }
