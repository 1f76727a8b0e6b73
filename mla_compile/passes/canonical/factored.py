"""Trace a node back through multiplications, divisions, permutations and reshapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from mla_compile.passes.canonical.row_factors import broadcast_axes
from mla_compile.passes.ir.axes import Axes
from mla_compile.passes.ir.graph import Builder, args_of, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Reorder
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same_sizes

aten = torch.ops.aten
Factor: TypeAlias = tuple[object, bool]
"""A tensor or number, and whether to divide by it instead of multiplying."""
Placed: TypeAlias = tuple[object, bool, Axes]
"""A factor with its axes."""

_MOST_STEPS = 8


@dataclass(frozen=True)
class Factored:
    """The node ``of`` after ``steps``. A step is a factor, or a node that permutes or reshapes."""

    of: fx.Node
    steps: tuple[Factor | fx.Node, ...] = ()

    @property
    def views(self) -> tuple[fx.Node, ...]:
        return tuple(step for step in self.steps if isinstance(step, fx.Node))

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(step for step in self.steps if not isinstance(step, fx.Node))

    @property
    def ends_with_a_factor(self) -> bool:
        return bool(self.steps) and not isinstance(self.steps[-1], fx.Node)

    def follow(self, axes: Axes) -> tuple[list[Placed], Axes] | None:
        """If ``of`` has ``axes``, return the factors with their axes, and the axes of the result.

        Return None if a view cuts through an atom.
        """
        placed: list[Placed] = []
        for step in self.steps:
            if not isinstance(step, fx.Node):
                placed.append((*step, broadcast_axes(step[0], axes)))
                continue
            how = decode(step)
            carried = how.map.forward(axes) if isinstance(how, Reorder) and how.map is not None else None
            if carried is None or carried[1]:
                return None
            axes = carried[0]
        return placed, axes


def factored(node: object, ends: Callable[[fx.Node], bool], most: int = _MOST_STEPS) -> Factored | None:
    """Trace ``node`` back to a node that ``ends`` accepts, over at most ``most`` nodes; return None if that fails.

    Conversions between floats are not recorded as steps.
    """
    if not is_tensor(node) or not val(node).dtype.is_floating_point or not most:
        return None
    if ends(node):
        return Factored(node)
    how = decode(node)
    if isinstance(how, Copy) and same_sizes(shape(how.x), shape(node)):
        return factored(how.x, ends, most - 1)
    if isinstance(how, Reorder):
        found = factored(how.x, ends, most - 1)
        return None if found is None else replace(found, steps=(*found.steps, node))
    # The only keyword is a rounding mode. If it is given, the result is not a plain quotient.
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or len(args_of(node)) != 2:
        return None
    a, b = args_of(node)
    for x, factor in ((a, b), (b, a))[: 1 if packet(node) is aten.div else 2]:
        if is_tensor(x) and same_sizes(shape(x), shape(node)):
            found = factored(x, ends, most - 1)
            if found is not None:
                return replace(found, steps=(*found.steps, (factor, packet(node) is aten.div)))
    return None


def viewed(builder: Builder, x: fx.Node, views: tuple[fx.Node, ...]) -> fx.Node:
    """Permute and reshape ``x`` as ``views`` do."""
    for view in views:
        assert callable(view.target)
        x = builder.call(view.target, x, *view.args[1:], **view.kwargs)
    return x
