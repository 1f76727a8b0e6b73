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
    """Register an operator or a layer class as a linear map of its rows whose weight is stored quantized.

    ``op(rows, ...)`` has to return ``rows W^T + bias`` [..., out] for rows [..., in], up to the rounding of the format.
    After registration, an up-projection by this operator is absorbed like any other, with the dequantized weight.
    Layers of a registered class must have ``in_features`` and ``out_features``, and their forward must take only rows.
    In models that are optimized after registration, each such layer becomes one operator, which runs the layer's own
    forward. No compiler traces into it.

    Args:
        op: the operator, its qualified name (``"bitsandbytes::gemm_4bit"``), or a class of layers. An operator given by
            name need not exist yet. The name may contain ``*``, for a namespace that includes the hash of a build.
        dequantize: a function that returns the weight [out, in] in float32 (or the widest dtype to which the format's
            own library dequantizes), or a tuple of this weight and the bias ([out] or ``None``). For a layer class, its
            argument is the layer. For an operator, its arguments are those of the operator except the rows, passed by
            their names in the schema. The function is traced, so it may call any operator but may not read values.
            If ``dequantize`` is ``None``, the weight is the operator's result for the unit vectors. This is exact for
            kernels that round nothing but weights.
        rows: the name of the operator's argument that holds the rows.
        rounds_rows: whether the operator rounds its rows as well (W8A8). Such products are absorbed only with
            ``quantized="absorb"``, and without that rounding.

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
