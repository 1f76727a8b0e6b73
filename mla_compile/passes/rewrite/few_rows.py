"""Compute products of a few rows and a weight by an operator that reads the weight at memory bandwidth.

Before: ``linear(x, weight, bias)``, or ``mm`` or ``addmm`` with a transposed weight, in a step with one row per request

After: ``mla_compile::few_rows_linear(x, weight, bias, most, scales, zeros)``, which reads int8 weights as stored
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, argument, bytes_hint, packet, shape, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.groups import groups_of
from mla_compile.passes.rewrite.as_stored import as_stored

aten = torch.ops.aten
Pays = Callable[[torch.device, torch.dtype, torch.dtype, int, int], bool]
"""Whether the operator is faster: by device, dtypes of rows and weight, number of rows, columns that share a scale."""


class LinearProduct(NamedTuple):
    """The operands: x [...,K], weight [O,K], and bias [O] or None.

    If ``width`` is not 0, the weight holds int8 codes, and each scale and zero point [O,K/width] belongs to ``width``
    columns of a row.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    scales: fx.Node | None = None
    zeros: fx.Node | None = None
    width: int = 0


def few_rows(
    graph: fx.Graph,
    fake_mode: FakeTensorMode | None,
    weights: AbstractSet[fx.Node],
    pays: Pays,
    least_bytes: int,
    most: int,
) -> int:
    """Replace products by the operator; return how many were replaced.

    ``weights``: the nodes computed from weights only. If a weight is computed in each call, its product is left to the
    compiler, which may fuse the two. A weight with a scale for each group of columns is read as it is stored.
    ``least_bytes`` and ``most``: the smallest weight and the largest number of rows for which the operator is used. A
    symbolic number of rows is judged by its hint. If a call has so many rows that torch is faster, the operator calls
    torch.
    """
    done = 0
    for node in list(graph.nodes):
        product = _product(node)
        if product is None:
            continue
        x, weight, bias, scales, zeros, width = product
        if not {n for n in (weight, scales, zeros) if n is not None} <= weights or _transposed(weight):
            continue
        rows = math.prod(shape(x)[:-1])
        if bytes_hint(weight) < least_bytes or math.prod(hint(size(n), n) for n in val(x).shape[:-1]) > most:
            continue
        # A symbolic number is 2 or more, because the graph for one row is compiled separately.
        counts = (rows,) if isinstance(rows, int) else range(2, most + 1)
        kinds = (val(weight).device, val(x).dtype, val(weight).dtype)
        few = max(itertools.takewhile(lambda count: pays(*kinds, count, width), counts), default=0)  # noqa: B023
        if few and all(val(n).dtype == val(node).dtype for n in (x, bias) if n is not None):
            op = torch.ops.mla_compile.few_rows_linear.default
            new = Builder(node, fake_mode).call(op, x, weight, bias, few, scales, zeros)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            done += 1
    if done:
        remove_dead_code(graph)
    return done


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
    stored = as_stored(factors[1], lambda node: groups_of(node) is not None)
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
    return LinearProduct(factors[0], groups.codes, bias, groups.scales, groups.zeros, groups.width)


def _transposed(weight: fx.Node) -> bool:
    """Whether the rows of a weight are not contiguous; every call of the operator would then copy the weight."""
    return val(weight).stride(-1) != 1
