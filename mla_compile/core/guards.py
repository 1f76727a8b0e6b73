"""Turns the guards of a graph with dynamic sizes into a predicate that checks other sizes.

torch's own ``ShapeEnv.produce_guards_expression`` is not used, because it joins the guards with ``and`` without
parentheses (torch 2.13 and 2.15). For the guards ``a`` and ``b or c``, the result ``a and b or c`` is true if only
``c`` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Holds = Callable[[Sequence[object]], bool]


def guards_of(env: ShapeEnv, placeholders: Sequence[object], *, ignore_static: bool = True) -> Holds:
    """Return a predicate that checks whether values for ``placeholders`` satisfy the guards.

    ``placeholders`` are fake tensors or symbolic numbers. With ``ignore_static``, sizes that were constants when the
    graph was made are not checked.
    """
    sources = [LocalSource(f"t{index}") for index in range(len(placeholders))]
    guards = env.produce_guards(list(placeholders), sources, ignore_static=ignore_static)
    code = " and ".join(f"({guard})" for guard in guards)
    return lambda values: not code or bool(env.evaluate_guards_expression(code, values))
