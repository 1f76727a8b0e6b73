"""The guards of a graph with dynamic sizes, as a predicate on other sizes.

torch's own ``ShapeEnv.produce_guards_expression`` joins the guards with ``and`` without parentheses. A guard that
contains ``or`` then splits the whole expression: only the guards before it or those after it have to hold (torch 2.13
and 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Holds = Callable[[Sequence[object]], bool]


def guards_of(env: ShapeEnv, placeholders: Sequence[object], *, ignore_static: bool = True) -> Holds:
    """A predicate: whether values in place of ``placeholders`` (fake tensors or symbolic numbers) satisfy the guards.

    ``ignore_static``: sizes that were constants when the graph was made are not checked.
    """
    sources = [LocalSource(f"t{index}") for index in range(len(placeholders))]
    guards = env.produce_guards(list(placeholders), sources, ignore_static=ignore_static)
    code = " and ".join(f"({guard})" for guard in guards)
    return lambda values: not code or bool(env.evaluate_guards_expression(code, values))
