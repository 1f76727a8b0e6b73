"""Operators of torch's registry by the names in their schemas."""

from __future__ import annotations

import torch
from torch import fx


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


_FUNCTIONALIZED = {"auto_functionalized", "auto_functionalized_v2"}


def called_name(node: fx.Node) -> str:
    """:func:`schema_name`, also of an operator that writes into memory: a functional graph calls it through another."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _FUNCTIONALIZED and node.args:
        target = node.args[0]  # type: ignore[assignment]
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def foreign_name(node: fx.Node) -> str | None:
    """:func:`called_name` of an operator that is neither torch's own nor ours; None for those."""
    name = called_name(node)
    own = name.split("::")[0] in ("aten", "prims", "prim", "higher_order", "mla_compile")
    return None if not name or own else name
