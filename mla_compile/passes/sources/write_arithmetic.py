"""Recognise cache writes by arithmetic, such as ``buffer * (1 - m) + new * m``.

All operators of such a write are linear in the buffer and the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, is_tensor, shape, val
from mla_compile.passes.ir.operators import varying
from mla_compile.passes.ir.sizes import same_sizes
from mla_compile.passes.sources.along_tokens import Applied, Writing
from mla_compile.passes.sources.write_operands import shared

aten = torch.ops.aten


class Reading(Protocol):
    """The interface that tells the functions below how an operand is made."""

    def shows(self, node: fx.Node) -> bool:
        """Whether ``node`` is the buffer or a slice of the buffer, perhaps after writes."""
        ...

    def part(self, node: object, of: fx.Node | None = None) -> Writing | None:
        """Return a record of how ``node``, an operand of ``of``, is made; None if there is no such record."""
        ...


def is_in_one_dtype(node: fx.Node) -> bool:
    """Whether each operand with the shape of ``node`` is boolean or has the dtype of ``node``."""
    tensors = (n for n in node.all_input_nodes if is_tensor(n) and same_sizes(shape(n), shape(node)))
    return all(val(n).dtype in (val(node).dtype, torch.bool) for n in tensors)


def _times(reading: Reading, node: fx.Node) -> Writing | None:
    x, factor = args_of(node)
    if isinstance(factor, (int, float)):
        return _step(node, reading.part(x, node), factor)
    if not is_tensor(factor):
        return None
    if reading.shows(factor) or (not reading.shows(x) and len(varying(factor)) > len(varying(x))):
        x, factor = factor, x
    return _step(node, reading.part(x, node), shared(factor, node))


def _over(reading: Reading, node: fx.Node) -> Writing | None:
    x, by = args_of(node)
    return _step(node, reading.part(x, node), shared(by, node) if is_tensor(by) else by)


def _opposite(reading: Reading, node: fx.Node) -> Writing | None:
    return _step(node, reading.part(args_of(node)[0], node))


def _sum(reading: Reading, node: fx.Node) -> Writing | None:
    x, y = args_of(node)[:2]
    return None if node.kwargs.get("alpha", 1) != 1 else _step(node, reading.part(x, node), reading.part(y, node))


def _choice(reading: Reading, node: fx.Node) -> Writing | None:
    mask, x, y = args_of(node)
    return _step(node, shared(mask, node), reading.part(x, node), reading.part(y, node))


def _between(reading: Reading, node: fx.Node) -> Writing | None:
    x, y, weight = args_of(node)
    return _step(node, reading.part(x, node), reading.part(y, node), shared(weight, node))


def _emptied(reading: Reading, node: fx.Node) -> Writing | None:
    x, mask, value = args_of(node)
    return _step(node, reading.part(x, node), shared(mask, node), value) if value == 0 else None


def _step(node: fx.Node, *args: object) -> Writing | None:
    return None if any(a is None for a in args) else Applied(node.target, args)  # type: ignore[arg-type]


ARITHMETIC: dict[object, Callable[[Reading, fx.Node], Writing | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum),
    aten.mul.Tensor: _times,
    aten.div.Tensor: _over,
    aten.neg.default: _opposite,
    aten.where.self: _choice,
    aten.lerp.Tensor: _between,
    aten.masked_fill.Scalar: _emptied,
}
"""The operators that are linear in buffer and new tokens, each with the function that records the operator."""
