"""Registration of operators and layers that the passes do not know."""

from __future__ import annotations

import torch

from mla_compile.errors import InputError
from mla_compile.passes.quantized import registry


def register_quantized_linear(
    op: str | torch._ops.OpOverloadPacket | torch._ops.OpOverload | type[torch.nn.Module],
    dequantize: registry.DequantizeFunction | None,
    *,
    rows: str = "rows",
    rounds_rows: bool = False,
) -> None:
    """Register an operator or a layer class as a linear map with a quantized weight.

    ``op(rows, ...)`` has to return ``rows W^T + bias`` [..., out] for rows [..., in], up to the rounding of the format.
    After registration, up-projections by this operator are absorbed, with the dequantized weight. Layers of a
    registered class must have ``in_features`` and ``out_features``, and their forward must take only rows. In models
    that are optimized after registration, each such layer becomes one operator. The operator runs the layer's own
    forward, into which no compiler traces.

    Args:
        op: the operator, its qualified name (``"bitsandbytes::gemm_4bit"``), or a class of layers. An operator given by
            name need not exist yet. The name may contain ``*``, for a namespace that includes the hash of a build.
        dequantize: a function that returns the weight [out, in], or a tuple of the weight and the bias ([out] or
            ``None``). The weight is in float32, or in the widest dtype to which the format's own library dequantizes.
            For a layer class, the function takes the layer. For an operator, the function takes the operator's
            arguments except the rows, passed by their names in the schema. The function is traced, so it may call any
            operator but may not read values. ``None`` computes the weight by calling the operator on the unit vectors.
            The result is exact if the kernel rounds only the weight.
        rows: the name of the operator's argument that holds the rows.
        rounds_rows: whether the operator also rounds its rows (W8A8). If it does, it is absorbed only with
            ``quantized="absorb"``, and the rows are then not rounded.

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
