"""Compute products of rows and a weight by an operator that a measurement on this machine found to be faster.

Before: ``linear(x, weight, bias)``, or ``mm`` or ``addmm`` with a transposed weight

After: ``mla_compile::linear(x, weight, bias, most, scales, zeros, wide=wide)``, which reads int8 weights as stored

Before: ``_grouped_mm(x, permute(weight), ends)``, the products of a mixture of experts

After: ``mla_compile::grouped_linear(x, weight, ends, most, wide=wide)``

Codes of four bits, stored as int8, are packed once: ``linear(x, codes, ..., packed)`` with a new input ``packed``.
The kernel of the operators multiplies up to ``most`` rows (of a group) at the speed of reading the weight. If ``wide``,
many rows are multiplied in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, argument, bytes_hint, packet, replace_each, shape, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.groups import groups_of
from mla_compile.passes.rewrite.as_stored import as_stored

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearOperator:
    """When the operator is faster than compiled code, by device, dtypes of rows and weight, and a weight's groups.

    Attributes:
        pays: whether its kernel is faster, also by the number of rows. The last argument is the number of columns that
            share a scale, or 0.
        most: the most rows for that kernel.
        many_rows: the dtype in which the operator multiplies many rows faster; None if compiled code is faster.
        many: the number of rows from which the operator may multiply in that dtype.
        least_bytes: the smallest weight for the operator, if there are few rows.
        packs: whether its kernel is faster if codes of four bits are packed, by device, dtypes of rows and scales, and
            number of columns that share a scale.
    """

    pays: Callable[[torch.device, torch.dtype, torch.dtype, int, int], bool]
    most: int
    many_rows: Callable[[torch.device, torch.dtype, torch.dtype, int], torch.dtype | None]
    many: int
    least_bytes: int
    packs: Callable[[torch.device, torch.dtype, torch.dtype, int], bool] = lambda *_: False


class LinearProduct(NamedTuple):
    """The operands: x [...,K], weight [O,K], and bias [O] or None.

    If ``width`` is not 0, the weight holds int8 codes, and each scale and zero point [O,K/width] belongs to ``width``
    columns of a row. ``four_bits``: whether the codes are -8 to 7.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    scales: fx.Node | None = None
    zeros: fx.Node | None = None
    width: int = 0
    four_bits: bool = False


class _Call(NamedTuple):
    """A call of an operator: its arguments, and how many rows its kernel takes or whether it widens more rows.

    ``packs``: the codes, scales and zero points of a weight that the kernel reads faster if they are packed.
    """

    op: Any
    args: tuple[fx.Node | int | None, ...]
    wide: bool
    packs: tuple[fx.Node | None, ...] = ()


def lower_products(
    graph: fx.Graph,
    fake_mode: FakeTensorMode | None,
    weights: AbstractSet[fx.Node],
    operator: LinearOperator,
    keep: Callable[[fx.Node], fx.Node] | None = None,
) -> int:
    """Replace products by the operators where they are faster; return how many were replaced.

    ``weights``: the nodes computed from weights only. If a weight is computed in each call, its product is left to the
    compiler, which may fuse the two. A weight with a scale for each group of columns is read as it is stored, or packed
    if ``keep`` is given, which turns a node into an input that holds its value.
    """

    def lowered(node: fx.Node) -> fx.Node | None:
        call = _linear(node, weights, operator) or _grouped(node, weights, operator)
        if call is None:
            return None
        builder, packed = Builder(node, fake_mode), []
        if call.packs and keep is not None:
            packed = [keep(builder.call(torch.ops.mla_compile.pack_codes.default, *call.packs))]
        return builder.call(call.op, *call.args, *packed, wide=call.wide)

    if done := replace_each(graph.nodes, lowered):
        remove_dead_code(graph)
    return done


def _linear(node: fx.Node, weights: AbstractSet[fx.Node], operator: LinearOperator) -> _Call | None:
    """Return the call that computes a product; None if ``node`` is none, or if compiled code is faster."""
    product = _product(node)
    if product is None:
        return None
    x, weight, bias, scales, zeros, width, four_bits = product
    stored = {_copied(n) for n in (weight, scales, zeros) if n is not None}
    if not stored <= weights or any(val(n).dtype != val(node).dtype for n in (x, bias) if n is not None):
        return None
    rows = math.prod(shape(x)[:-1])
    expected = math.prod(hint(size(n), n) for n in val(x).shape[:-1])
    # A symbolic number is 2 or more, because the graph for one row is compiled separately.
    counts = [rows] if isinstance(rows, int) else _powers_of_two(2, operator.most)
    found = _faster(x, weight, width, rows, expected, counts, operator)
    if found is None:
        return None
    most, wide = found
    packs: tuple[fx.Node | None, ...] = ()
    # A weight that is copied in each call is not packed, because packing takes longer than the product.
    if most and four_bits and scales is not None and stored == {weight, scales, zeros} - {None}:
        kinds = (val(x).device, val(x).dtype, val(scales).dtype)
        packs = (weight, scales, zeros) if operator.packs(*kinds, width) else ()
    return _Call(torch.ops.mla_compile.linear.default, (x, weight, bias, most, scales, zeros), wide, packs)


def _grouped(node: fx.Node, weights: AbstractSet[fx.Node], operator: LinearOperator) -> _Call | None:
    """Return the call that computes products of sorted rows, each group with its own weight; None as above."""
    if packet(node) is not aten._grouped_mm or node.kwargs or len(args_of(node)) != 3:
        return None
    x, turned, ends = args_of(node)
    stored = as_stored(turned)
    if stored is None or [args_of(n)[1] for n in stored[1] if packet(n) is aten.permute] != [[0, 2, 1]]:
        return None
    (weight, views), (rows, *_) = stored, shape(x)
    if len(views) != 1 or weight not in weights or len(shape(x)) != 2 or val(weight).dtype != val(x).dtype:
        return None
    traced = val(x).shape[0]
    expected = -(-hint(size(traced), traced) // val(weight).shape[0])
    counts = _powers_of_two(1, min(operator.most, rows) if isinstance(rows, int) else operator.most)
    found = _faster(x, weight, 0, rows, expected, counts, operator)
    return found and _Call(torch.ops.mla_compile.grouped_linear.default, (x, weight, ends, found[0]), found[1])


def _ends(node: fx.Node) -> bool:
    """Whether the operator can read ``node`` as a weight: codes in groups, a copy, or some rows of an input."""
    rows = packet(node) is aten.slice and args_of(node)[0].op in ("placeholder", "get_attr")
    return rows or groups_of(node) is not None or _copied(node) is not node


def _copied(weight: fx.Node) -> fx.Node:
    """Return the weight that is copied in each call because groups of heads run in turn, or else ``weight`` itself."""
    return args_of(weight)[0] if weight.target is torch.ops.mla_compile.copy_after.default else weight


def _powers_of_two(least: int, most: int) -> list[int]:
    return [n for k in range(most.bit_length()) if (n := 1 << k) >= least]


def _faster(
    x: fx.Node,
    weight: fx.Node,
    width: int,
    rows: object,
    expected: int,
    counts: Iterable[int],
    operator: LinearOperator,
) -> tuple[int, bool] | None:
    """Return how many rows the operator's kernel takes, and whether more rows are multiplied in a wider dtype.

    None if compiled code is faster for the ``expected`` rows, or if reading the weight takes a copy. ``counts``: the
    numbers of rows for which the kernel is measured. If a call has another number of rows than expected, the operator
    may have to call torch.
    """
    # A small weight pays for many rows, in which it is read as often as a large one is for a few.
    least = operator.least_bytes // max(1, expected // operator.many)
    if bytes_hint(weight) // math.prod(val(weight).shape[:-2]) < least or val(weight).stride(-1) != 1:
        return None
    kinds = (val(weight).device, val(x).dtype, val(weight).dtype)
    dtype = None if isinstance(rows, int) and rows < operator.many else operator.many_rows(*kinds, width)
    if dtype is None and expected > operator.most:
        return None
    few = max(itertools.takewhile(lambda count: operator.pays(*kinds, count, width), counts), default=0)
    return (few, dtype not in (None, val(x).dtype)) if few or dtype is not None else None


def _product(node: fx.Node) -> LinearProduct | None:
    """Return the operands if the weight is an input [O,K] or its transpose, converted exactly if at all; else None.

    The weight may also be dequantized from inputs, with a scale for each group of columns.
    """
    bias, factors = None, args_of(node)
    if packet(node) is aten.addmm:
        bias, factors = factors[0], factors[1:]
        if node.kwargs or len(shape(bias)) != 1:
            return None
    elif packet(node) is aten.linear:
        bias = argument(node, 2, "bias")
    elif packet(node) not in (aten.mm, aten.matmul) or len(shape(factors[1])) != 2:
        return None
    stored = as_stored(factors[1], _ends)
    if stored is None or len(shape(stored[0])) != 2:
        return None
    turns = [args_of(n)[1] if packet(n) is aten.permute else None for n in stored[1]]
    fits = turns == [] if packet(node) is aten.linear else turns in ([[1, 0]], [[-1, -2]])
    if not fits:
        return None
    groups = groups_of(stored[0])
    if groups is None:
        return LinearProduct(factors[0], stored[0], bias)
    if val(stored[0]).dtype != val(node).dtype:  # the weight is rounded to fewer digits than the product has
        return None
    return LinearProduct(factors[0], groups.codes, bias, *groups[1:])
