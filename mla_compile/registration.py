"""What users may tell the passes about operators that these do not know."""

from __future__ import annotations

import torch

from mla_compile.errors import InputError
from mla_compile.passes.quantized import registry


def register_quantized_linear(
    op: str | torch._ops.OpOverloadPacket | torch._ops.OpOverload | type[torch.nn.Module],
    dequantize: registry.Dequantize | None,
    *,
    rows: str = "rows",
    rounds_rows: bool = False,
) -> None:
    """Tells the passes that an operator, or a layer, is a linear map of its rows, whose weight is stored quantized.

    ``op(rows, ...)`` has to return ``rows W^T + bias`` [..., out] for rows [..., in], up to the rounding of the format.
    From then on an up-projection by this operator is absorbed like any other, with the dequantized weight. Layers of a
    class (with ``in_features`` and ``out_features``, called with rows alone) are one operator of models that are
    optimized from then on: their own forward, which no compiler looks into.

    Args:
        op: the operator, or its qualified name (``"bitsandbytes::gemm_4bit"``), which need not exist yet. A name may
            hold ``*`` where a namespace has the hash of a build in it. Or a class of layers.
        dequantize: called with the operator's other arguments by their names in its schema; returns the weight
            [out, in] in float32 (or the widest dtype that the format's own library dequantizes to), or a tuple of the
            weight and the bias [out] or ``None``. It is traced, so it may call any operator but not read values. That
            of a class is called with the layer.
            ``None``: the weight is what the operator makes of the unit vectors, which is exact for kernels that round
            nothing but weights.
        rows: the name of the argument that holds the rows; of an operator.
        rounds_rows: the operator rounds its rows as well (W8A8). Such products are absorbed with
            ``quantized="absorb"`` only, and without that rounding.

    Raises:
        InputError: the name has no namespace, or the operator has no such argument.
    """
    if isinstance(op, type) and issubclass(op, torch.nn.Module):
        registry.registered.layers[op] = registry.QuantizedLinear("rows", dequantize, rounds_rows)
        return
    name = op if isinstance(op, str) else op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else ""
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name
        names = [argument.name for argument in op._schema.arguments]
        if rows not in names:
            raise InputError(f"{name} has no argument {rows!r} for the rows; its arguments: {', '.join(names)}")
    if "::" not in name:
        raise InputError(
            f"op is {op!r}, expected an operator of torch.ops, its name as namespace::name, or a class of layers"
        )
    registry.registered.add(name, registry.QuantizedLinear(rows, dequantize, rounds_rows))
