"""Look-ups of operators in torch's registry, by the names in their schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def schema_name(node: fx.Node) -> str:
    """Return ``namespace::name`` of the operator that ``node`` calls; empty if the operator is not registered."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a registered operator by name, including defaults.

    The values are untyped, because operators take different types.
    """
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
    """Return the :func:`schema_name` of the operator that ``node`` calls, even if the operator is wrapped.

    Functionalization wraps operators that mutate their arguments.
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _FUNCTIONALIZED and node.args:
        target = node.args[0]  # type: ignore[assignment]
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def foreign_name(node: fx.Node) -> str | None:
    """Return the :func:`called_name` of an operator; None if the operator belongs to torch or to mla_compile."""
    name = called_name(node)
    own = name.split("::")[0] in ("aten", "prims", "prim", "higher_order", "mla_compile")
    return None if not name or own else name
