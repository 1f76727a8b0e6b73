"""Lets a trace call string methods on the name of a class.

Libraries recognise their own tensor classes by name. ``type(weight).__module__.startswith(...)`` breaks Dynamo's graph
even if ``weight`` is an ordinary ``nn.Parameter``: Dynamo knows the class, but does not call methods of the class's
attributes (torch 2.13 and 2.14).
"""

from __future__ import annotations

import re
from typing import Any

from torch._dynamo.variables import ConstantVariable, GetAttrVariable

FIX = "call mla_compile.optimize(model), which reads the name of a class without a graph break"
"""Advice for breaks found by :func:`is_of_a_name`. :func:`read_names` affects only traces that this package starts."""

_BREAK = re.compile(r"method `\w+` of class `str`")


def is_of_a_name(why: str) -> bool:
    """Whether ``why`` is Dynamo's message about a break at a method of a string."""
    return _BREAK.search(why) is not None


def read_names(output: Any) -> None:
    """Let a trace call methods of a class's string attributes. The trace writes into Dynamo's ``output``."""
    call = GetAttrVariable.call_method

    def call_method(self: GetAttrVariable, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        text = _text(self) if tx.output is output else None
        return call(self, tx, name, args, kwargs) if text is None else text.call_method(tx, name, args, kwargs)

    def restore() -> None:
        GetAttrVariable.call_method = call  # type: ignore[method-assign]

    GetAttrVariable.call_method = call_method  # type: ignore[method-assign, assignment]
    output.add_cleanup_hook(restore)


def _text(attribute: GetAttrVariable) -> Any:
    """Return the value of a class's attribute if it is a string, else None."""
    owner = getattr(attribute.obj, "value", None)
    value = getattr(owner, attribute.name, None) if isinstance(owner, type) else None
    return ConstantVariable.create(value) if type(value) is str else None
