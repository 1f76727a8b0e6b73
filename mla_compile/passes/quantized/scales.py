"""Scales of rows. A scale is a power of a root tensor, which may hold the largest magnitudes of the rows.

Each number of a scale belongs to one block of the rows. Blocks are equally long and adjacent in memory. Views keep
this order, so a scale is identified by the root node and the length of a block.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.moves import Copy
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, quotient, same

aten = torch.ops.aten

TINY = 2.0**-6
"""The maximum bound of a guard against division by zero. The guard raises a block's largest magnitude to its bound.

Blocks with smaller numbers get fewer steps than the format has. A guard with a higher bound would change ordinary rows,
so it is treated as part of the model.
"""


@dataclass(frozen=True)
class Scale:
    """``root ** exponent``. Each number scales ``block`` numbers of the rows that are adjacent in memory."""

    root: fx.Node
    block: Size
    exponent: int


REGROUPS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze,
}  # fmt: skip
COPIES = {aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias, aten.type_as}


def regrouped(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which ``node`` is a view, if the numbers keep their order; else None."""
    if packet(node) not in REGROUPS:
        return None
    x: fx.Node = argument(node, 0, "self")
    return x if val(x).dtype == val(node).dtype else None  # otherwise the view reinterprets the bytes


def copied(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``node`` copies, perhaps into another dtype."""
    if packet(node) not in COPIES:
        return None
    how = decode(node)
    return how.x if isinstance(how, Copy) else None


def covers(scale: tuple[Size, ...], rows: tuple[Size, ...]) -> bool:
    """Whether a tensor of shape ``scale`` broadcasts to ``rows`` by repeating each number along the last axes only."""
    if len(scale) > len(rows):
        return False
    padded = (*([1] * (len(rows) - len(scale))), *scale)
    kept = max((k for k, s in enumerate(padded, 1) if not same(s, 1)), default=0)
    return all(same(a, b) for a, b in zip(padded[:kept], rows[:kept], strict=True))


def block(scale: fx.Node, rows: fx.Node) -> Size | None:
    """Return how many numbers of ``rows`` share one number of ``scale``."""
    return quotient(math.prod(shape(rows)), math.prod(shape(scale)))


def power_of(node: fx.Node) -> tuple[fx.Node, int, float]:
    """Return (root, exponent, factor) with ``node = factor * root ** exponent`` elementwise, in memory order."""
    exponent, factor = 1, 1.0
    while True:
        op, args = packet(node), args_of(node)
        x = _before(node)
        if x is not None:
            node = x
        elif op is aten.reciprocal:
            node, exponent = args[0], -exponent
        elif op in (aten.mul, aten.div) and not node.kwargs and isinstance(args[1], (int, float)) and args[1] != 0:
            factor *= float(args[1]) ** (exponent if op is aten.mul else -exponent)
            node = args[0]
        elif op is aten.div and not node.kwargs and isinstance(args[0], (int, float)) and args[0] != 0:
            factor *= float(args[0]) ** exponent
            node, exponent = args[1], -exponent
        else:
            return node, exponent, factor


def _before(node: fx.Node) -> fx.Node | None:
    """Return a tensor one step upstream with equal numbers in equal order, or None."""
    return regrouped(node) or _float_copy(node) or _turned_back(node)


def _float_copy(node: fx.Node) -> fx.Node | None:
    x = copied(node)
    floats = x is not None and all(val(n).dtype.is_floating_point and val(n).dtype.itemsize > 1 for n in (x, node))
    return x if floats else None


def _turned_back(node: fx.Node) -> fx.Node | None:
    """Skip a permutation that undoes an earlier permutation. Kernels that need scales stored by columns cause this."""
    back = _order(node)
    if back is None:
        return None
    x = args_of(node)[0]
    while (of := _float_copy(x)) is not None:
        x = of
    forth = _order(x)
    turned = forth is not None and [forth[d] for d in back] == sorted(back)
    return args_of(x)[0] if turned else None


def _order(node: fx.Node) -> list[int] | None:
    """Return the operand's axis for each axis of ``node``; None unless ``node`` is a permutation."""
    order = list(range(len(shape(node))))
    if packet(node) is aten.permute:
        return [axis(d, len(order)) for d in argument(node, 1, "dims")]
    if packet(node) is aten.t:
        return order[::-1]
    if packet(node) is aten.transpose:
        a, b = (axis(d, len(order)) for d in args_of(node)[1:])
        order[a], order[b] = b, a
        return order
    return None


def largest_over(scale: Scale, rows: fx.Node) -> float | None:
    """Return the maximum of |rows| / root if the root is computed from the largest magnitudes of the rows' blocks."""
    factor, node, floor = 1.0, scale.root, 0.0
    while (below := _at_least(node)) is not None:
        node, by, least = below
        floor = max(floor, least / factor)
        factor /= by
    found = _largest(node)
    if found is None or not floor * factor <= TINY:
        return None
    of, length = found
    return factor if _numbers(of) is _numbers(rows) and same(length, scale.block) else None


def _at_least(node: fx.Node) -> tuple[fx.Node, float, float] | None:
    """Take one step back: return ``(x, factor, floor)`` with ``node >= max(factor * x, floor)`` for all ``x >= 0``."""
    op, args = packet(node), args_of(node)
    x = _before(node)
    if x is not None:
        return x, 1.0, 0.0
    if op in (aten.clamp, aten.clip, aten.clamp_min):
        floor = argument(node, 1, "min")
        free = op is aten.clamp_min or argument(node, 2, "max") is None
        return (args[0], 1.0, float(floor)) if free and isinstance(floor, (int, float)) else None
    number = args[1] if len(args) > 1 and not node.kwargs else None
    if not isinstance(number, (int, float)):
        return None
    if op is aten.add and number >= 0:
        return args[0], 1.0, float(number)
    if op in (aten.mul, aten.div) and number > 0:
        return args[0], float(number) if op is aten.mul else 1.0 / number, 0.0
    return None


def _largest(node: fx.Node) -> tuple[fx.Node, Size] | None:
    """Return a tensor and a block length if ``node`` holds the largest magnitude of each block; else None."""
    whole = node
    if packet(node) is operator.getitem and args_of(node)[1] == 0:
        whole = args_of(node)[0]
    op, args = packet(whole), args_of(whole)
    dims: object
    if op is aten.linalg_vector_norm and argument(whole, 1, "ord", 2) == math.inf:
        x, dims = args[0], argument(whole, 2, "dim")
    elif op in (aten.amax, aten.max) and packet(args[0]) is aten.abs:
        x, dims = args_of(args[0])[0], argument(whole, 1, "dim")
    else:
        return None
    if isinstance(dims, fx.Node):  # `dims` is then the other operand of an elementwise maximum
        return None
    rank = len(shape(x))
    axes = set(range(rank)) if dims in (None, [], ()) else {axis(d, rank) for d in _several(dims)}
    if axes != set(range(rank - len(axes), rank)):
        return None
    return x, math.prod(shape(x)[rank - len(axes) :])


def _several(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def _numbers(node: fx.Node) -> fx.Node:
    """Return the first node upstream with the numbers of ``node`` in equal order."""
    while (x := _before(node)) is not None:
        node = x
    return node
