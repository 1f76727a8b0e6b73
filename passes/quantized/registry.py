"""Products of rows with a weight in a format of its own, and how each weight is dequantized.

What is known lies in :mod:`mla_compile.passes.quantized.library`; :func:`register_quantized_linear` adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from mla_compile.errors import InputError

Dequantize = Callable[..., "torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]"]


@dataclass(frozen=True)
class QuantizedLinear:
    """An operator that computes ``rows W^T + bias`` [..., out] from rows [..., in].

    Attributes:
        rows: the name of the argument that holds the rows.
        dequantize: called with all other arguments of the operator by name; returns W [out, in] in a floating dtype, or
            W and the bias [out] (``None``: none). None: the weight is what the operator makes of the unit vectors.
        rounds: whether the operator rounds the rows, too.
    """

    rows: str
    dequantize: Dequantize | None
    rounds: bool = False


class Products:
    """Products by the qualified names of their operators, maybe patterns: some namespaces hold a build's hash."""

    def __init__(self, known: Mapping[str, QuantizedLinear]) -> None:
        self._known = dict(known)

    def add(self, name: str, product: QuantizedLinear) -> None:
        self._known[name] = product

    def get(self, node: fx.Node) -> QuantizedLinear | None:
        """What is known of the product that ``node`` calls."""
        name = schema_name(node)
        if not name or name in self._known:
            return self._known.get(name)
        return next((known for pattern, known in self._known.items() if fnmatchcase(name, pattern)), None)


registered = Products({})
"""What users have registered."""


def register_quantized_linear(
    op: str | torch._ops.OpOverloadPacket | torch._ops.OpOverload,
    dequantize: Dequantize | None,
    *,
    rows: str,
    rounds_rows: bool = False,
) -> None:
    """Tells the passes that an operator is a linear map of its rows, whose weight is stored quantized.

    ``op(rows, ...)`` has to return ``rows W^T + bias`` [..., out] for rows [..., in], up to the rounding of the format.
    From then on an up-projection by this operator is absorbed like any other, with the dequantized weight.

    Args:
        op: the operator, or its qualified name (``"bitsandbytes::gemm_4bit"``), which need not exist yet. A name may
            hold ``*`` where a namespace has the hash of a build in it.
        dequantize: called with the operator's other arguments by their names in its schema; returns the weight
            [out, in] in float32 (or the widest dtype that the format's own library dequantizes to), or a tuple of the
            weight and the bias [out] or ``None``. It is traced, so it may call any operator but not read values.
            ``None``: the weight is what the operator makes of the unit vectors, which is exact for kernels that round
            nothing but weights.
        rows: the name of the argument that holds the rows.
        rounds_rows: the operator rounds its rows as well (W8A8). Such products are absorbed with
            ``quantized="absorb"`` only, and without that rounding.

    Raises:
        InputError: the name has no namespace, or the operator has no such argument.
    """
    name = op if isinstance(op, str) else op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else ""
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name
        names = [argument.name for argument in op._schema.arguments]
        if rows not in names:
            raise InputError(f"{name} has no argument {rows!r} for the rows; its arguments: {', '.join(names)}")
    if "::" not in name:
        raise InputError(f"op is {op!r}, expected an operator of torch.ops, or its name as namespace::name")
    registered.add(name, QuantizedLinear(rows, dequantize, rounds_rows))


def schema_name(node: fx.Node) -> str:
    """``namespace::name`` of the operator that ``node`` calls; empty where it calls none of torch's registry."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def named_arguments(node: fx.Node) -> dict[str, object]:
    """The arguments of an operator of torch's registry by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found: dict[str, object] = {}
    for position, one in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            found[one.name] = node.args[position]
        else:
            found[one.name] = node.kwargs.get(one.name, one.default_value)
    return found
