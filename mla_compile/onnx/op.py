"""The ONNX operator ``mla_compile::DecodeAttention``: its schema, and how ``mla_compile::decode_attention`` becomes it.

Inputs: query [B,S,H,La+Lb], latent [B,C,La], and optionally rope [B,C,Lb], mask (bool or float) [B|1,H|1,S|1,T],
seq_lens int64 [B], sinks float [H], values [B,C,Lv]. Outputs: out [B,S,H,Lv] in query's dtype, and optionally the
natural logarithm of the sum of exponentials, float [B,S,H]. With a mask, T is its last axis and rows of the cache from
T on (C > T) are unused capacity; without one T = C. The formulas are those of :mod:`mla_compile.kernels.reference`;
``value_width`` > 0 sums the first ``value_width`` columns of [latent, rope] instead of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import values as onnxscript_values

from mla_compile import ops
from mla_compile.errors import ExportError
from mla_compile.onnx.manifest import OP_VERSION

DOMAIN = "mla_compile"
NAME = "DecodeAttention"
VERSION = OP_VERSION
INPUTS = ("query", "latent", "rope", "mask", "seq_lens", "sinks", "values")

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]


def schema() -> onnx.defs.OpSchema:
    """The operator's schema; query may be float32 beside rows in half precision."""
    kinds = {"query": "Q", "latent": "T", "rope": "T", "mask": "M", "seq_lens": "tensor(int64)"}
    kinds |= {"sinks": "tensor(float)", "values": "T"}
    parameter, option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
    optional = option.Optional
    return onnx.defs.OpSchema(
        NAME,
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter(name, kinds[name], param_option=option.Single if name in INPUTS[:2] else optional)
            for name in INPUTS
        ],
        outputs=[parameter("out", "Q"), parameter("lse", "tensor(float)", param_option=optional)],
        type_constraints=[
            ("Q", _FLOATS, "query and result"),
            ("T", _FLOATS, "rows of the cache"),
            ("M", [*_FLOATS, "tensor(bool)"], "added to the scores, or True: attend"),
        ],
        attributes=[
            onnx.defs.OpSchema.Attribute("scale", onnx.defs.OpSchema.AttrType.FLOAT, required=True),
            *(
                onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, default))
                for name, default in (("causal", 0), ("softcap", 0.0), ("window", 0), ("value_width", 0))
            ),
        ],
    )


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``."""
    operator = onnxscript_values.Op(onnxscript_values.Opset(DOMAIN, VERSION), NAME, schema())

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
        if kv_scale is not None:
            raise ExportError("a cache with scales (kv_scale) has no counterpart in the ONNX operator")
        if indices is not None:
            raise ExportError(
                "lists of keys (indices) have no counterpart in the ONNX operator; optimize(sparse='never')"
            )
        return operator(
            query, latent, rope, mask, seq_lens, sinks, values,
            scale=scale, causal=int(causal), softcap=softcap, window=window,
        )  # fmt: skip

    return {torch.ops.mla_compile.decode_attention.default: decode_attention, ops.decode_attention: decode_attention}
