"""Recognise products in operators without a rule. Libraries have their own kernels for packed weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, elements_hint, is_tensor, packet, shape
from mla_compile.passes.ir.moves import Fill
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same

_FUNCTIONALIZED = {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"}

_ATEN = {"_int_mm", "_scaled_mm", "_scaled_mm_v2", "_weight_int4pack_mm", "_weight_int8pack_mm"}
"""ATen operators that multiply by a quantized weight. All other ATen operators for products have rules."""


def foreign_rows(node: fx.Node, weights: Collection[fx.Node]) -> fx.Node | None:
    """Return the rows that ``node`` multiplies by a weight in an unknown format; None if it is no such product.

    A product reads weights and rows [..., in], perhaps with scales of the rows, and returns the same number of rows
    with another width.
    """
    call = args_of(node)[0] if packet(node) is operator.getitem else node
    if not is_tensor(node) or foreign_name(call) is None:
        return None
    read = [n for n in call.all_input_nodes if is_tensor(n) and len(shape(n)) > 1 and not isinstance(decode(n), Fill)]
    given = [n for n in read if n not in weights]
    if not given or len(given) == len(read):
        return None
    rows = max(given, key=elements_hint)
    as_many = same(math.prod(shape(rows)[:-1]), math.prod(shape(node)[:-1]))
    return rows if as_many and not same(shape(rows)[-1], shape(node)[-1]) else None


def foreign_name(call: object) -> str | None:
    """Return the name of the library operator (or operator in ``_ATEN``) that ``call`` runs; None for any other.

    In a functional graph, an operator that mutates its arguments is itself an argument of a higher-order operator.
    """
    target = call.target if isinstance(call, fx.Node) else None
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _FUNCTIONALIZED:
        (target, *_) = args_of(call) or ("a kernel of Triton",)  # type: ignore[arg-type]
        return str(getattr(target, "_opname", target))
    if not isinstance(target, torch._ops.OpOverload):
        return None
    known = target.namespace in ("aten", "prims") and target._opname not in _ATEN
    return None if known else target._opname
