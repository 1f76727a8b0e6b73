"""Compute the lengths that masks express, as the operator's ``seq_lens``, int32 [B]."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from functools import partial, reduce

import torch
from torch import fx

from mla_compile.passes.attention.site import Affine, Operand
from mla_compile.passes.attention.visible import offset_of
from mla_compile.passes.ir.arrange import SizeSources, arrange, spread
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.sources.records import AbsorbPlan

aten = torch.ops.aten


LARGEST = 2**62
"""Numbers read from a tensor are clamped to this bound, so that a sentinel (the largest int64) cannot wrap around."""


class Lengths:
    """Writes each length once: the layers of a model have equal masks, so later layers read the first layer's node."""

    def __init__(self) -> None:
        self._written: dict[Hashable, fx.Node] = {}

    def write(self, plan: AbsorbPlan, builder: Builder, sizes: SizeSources) -> fx.Node | None:
        """Return the smallest of the plan's lengths for each batch entry, or None if the plan has none."""
        if not plan.visible.lengths:
            return None
        key = tuple(_key(length, plan) for length in plan.visible.lengths)
        if key not in self._written:
            each = [_written(length, plan, builder, sizes) for length in plan.visible.lengths]
            total = reduce(partial(builder.call, aten.minimum.default), each)
            (keys,) = sizes.shape([plan.site.keys])
            # Clamp before the cast, which would wrap a length beyond int32.
            total = builder.call(aten.clamp.default, total, 0, keys)
            self._written[key] = builder.cast(total, torch.int32)
        return self._written[key]


def _written(length: Affine, plan: AbsorbPlan, builder: Builder, sizes: SizeSources) -> fx.Node:
    """Return one length, int64 [B]."""
    known, offset = offset_of(length.const, dict(plan.visible.numbers))
    assert offset is not None, "a length is made of sizes that nodes hold"
    const = offset if known is None else builder.call(operator.add, known, offset)
    if not length.terms:
        device = val(plan.latent.node).device
        shape = sizes.shape([plan.batch])
        return builder.call(aten.full.default, shape, const, dtype=torch.int64, device=device)
    total: fx.Node | None = None
    for operand, factor in length.terms.items():
        one = builder.cast(_each(operand, plan, builder, sizes), torch.int64)
        one = builder.call(aten.clamp.default, one, -LARGEST, LARGEST)
        one = one if factor == 1 else builder.call(aten.mul.Tensor, one, factor)
        total = one if total is None else builder.call(aten.add.Tensor, total, one)
    assert total is not None
    return builder.call(aten.add.Tensor, total, const)


def _each(operand: Operand, plan: AbsorbPlan, builder: Builder, sizes: SizeSources) -> fx.Node:
    """Return ``operand`` as one number per batch entry [B], even if all entries share a number."""
    atoms = tuple((a,) for a in plan.batch)
    node = builder.on_device(operand.node, val(plan.latent.node).device)
    node = arrange(builder, sizes, node, operand.axes, atoms)
    node = spread(builder, sizes, node, plan.batch)
    return arrange(builder, sizes, node, atoms, [plan.batch])


def _key(length: Affine, plan: AbsorbPlan) -> Hashable:
    """Return a key that is equal for equal lengths of different sites, which have different atoms."""
    terms = [
        (operand.node, factor, tuple(tuple(plan.batch.index(a) for a in axis) for axis in operand.axes))
        for operand, factor in length.terms.items()
    ]
    return length.const, frozenset(terms), tuple(a.size for a in plan.batch)
