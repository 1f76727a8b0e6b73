"""What a graph of open sizes was made under, as a question that can be asked of other sizes.

torch has the same as ``ShapeEnv.produce_guards_expression``, which joins its guards with ``and`` as they are. Where one
of them says ``or``, the whole then says: all before it, or all after it (torch 2.13 and 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Holds = Callable[[Sequence[Any]], bool]


def guards_of(env: ShapeEnv, placeholders: Sequence[Any], *, ignore_static: bool = True) -> Holds:
    """Whether values in the place of ``placeholders`` (fake tensors or symbolic numbers) fit what was assumed of them.

    ``ignore_static``: sizes that were numbers when the graph was made are not asked for.
    """
    sources = [LocalSource(f"t{index}") for index in range(len(placeholders))]
    guards = env.produce_guards(list(placeholders), sources, ignore_static=ignore_static)
    code = " and ".join(f"({guard})" for guard in guards)
    return lambda values: not code or bool(env.evaluate_guards_expression(code, values))
