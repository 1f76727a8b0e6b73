"""Turn terms that the model adds to a row's sum of exponentials into one additional score of the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import fx

from mla_compile.passes.canonical.row_factors import DivisorTerm, RowNumber
from mla_compile.passes.ir.arrange import SizeSources, arrange
from mla_compile.passes.ir.axes import Axes
from mla_compile.passes.ir.graph import Builder, shape, val

aten = torch.ops.aten


def dtype_of_terms(terms: Sequence[DivisorTerm], at_least: torch.dtype) -> torch.dtype:
    numbers = [val(number.node).dtype for term in terms for number, _ in term.powers]
    return reduce(torch.promote_types, numbers, at_least)


def sink_column(
    builder: Builder, terms: Sequence[DivisorTerm], x: fx.Node, axes: Axes, dim: int, dtype: torch.dtype
) -> fx.Node:
    """Return the logarithm of the sum of ``terms`` as a column to append to ``x``, with size 1 along ``dim``.

    ``axes``: the axes of ``x`` in the atoms of the terms.
    """
    writer = _ColumnWriter(builder, x, axes, dim, dtype)
    column = reduce(lambda a, b: builder.call(aten.logaddexp.default, a, b), map(writer.logarithm, terms))
    sizes = [1 if d == dim else builder.size(x, d) for d in range(len(axes))]
    return builder.call(aten.expand.default, column, sizes)


class _ColumnWriter:
    def __init__(self, builder: Builder, x: fx.Node, axes: Axes, dim: int, dtype: torch.dtype) -> None:
        self.builder, self.x, self.dtype = builder, x, dtype
        self.target = (*axes[:dim], (), *axes[dim + 1 :])
        self.sizes = SizeSources(builder, [(x, axes)])

    def logarithm(self, term: DivisorTerm) -> fx.Node:
        call = self.builder.call
        found: fx.Node | None = None
        for number, power in term.powers:
            one = self._column(number)
            one = one if power == 1 else call(aten.mul.Tensor, one, power)
            found = one if found is None else call(aten.add.Tensor, found, one)
        if found is None:
            sizes = [1] * len(shape(self.x))
            return call(aten.full.default, sizes, math.log(term.factor), dtype=self.dtype, device=val(self.x).device)
        return found if term.factor == 1 else call(aten.add.Tensor, found, math.log(term.factor))

    def _column(self, number: RowNumber) -> fx.Node:
        node = self.builder.cast(number.node, self.dtype)
        return arrange(self.builder, self.sizes, node, number.axes, self.target)
