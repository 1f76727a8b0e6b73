"""einops-style rearrangement of nodes whose axes are products of atoms."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, Axes, Axis, T, axis_size, flatten, letters, placed
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.ir.sizes import hint, size

aten = torch.ops.aten
Dim: TypeAlias = "int | fx.Node"


class SizeSources:
    """Finds the size of an atom: a constant, or a node that reads the size from a known tensor."""

    def __init__(self, builder: Builder, operands: Iterable[tuple[fx.Node, Axes]]) -> None:
        self.builder = builder
        self._at: dict[Atom, tuple[fx.Node, int]] = {}
        self._nodes: dict[Atom, Dim] = {}
        for node, axes in operands:
            for dim, axis in enumerate(axes):
                if len(axis) == 1:
                    # Only an axis with a single atom shows the atom's size. For a merged axis, `sym_size` returns the
                    # product.
                    self._at.setdefault(axis[0], (node, dim))

    def show(self, axis: Axis, node: fx.Node, dim: int) -> None:
        """Record that dimension ``dim`` of ``node`` has the size of ``axis``, which has at most one atom."""
        for atom in axis:
            self._at.setdefault(atom, (node, dim))

    def of(self, atom: Atom) -> Dim:
        """Return the atom's size as an argument of an operator.

        The size is -1 if no tensor shows it. A reshape can infer one such size.
        """
        if isinstance(atom.size, int):
            return atom.size
        if atom not in self._nodes:
            self._nodes[atom] = self.builder.size(*self._at[atom]) if atom in self._at else -1
        return self._nodes[atom]

    def shape(self, axes: Sequence[Axis]) -> list[Dim]:
        """Return the shape of a tensor with these axes.

        At most one symbolic size is left as -1. A reshape infers this size.
        """
        dims: list[Dim] = []
        for axis in axes:
            total = axis_size(axis)
            if isinstance(total, int):
                dims.append(total)
            else:
                dims.append(self.of(axis[0]) if len(axis) == 1 else -1)
        for k, axis in enumerate(axes):
            if dims[k] == -1 and dims.count(-1) > 1:  # a reshape infers at most one size
                dims[k] = self._product(axis)
        return dims

    def _product(self, axis: Axis) -> Dim:
        total: Dim = 1
        for atom in axis:
            one = self.of(atom)
            total = self.builder.call(operator.mul, total, one) if total != 1 else one
        return total


def arrange(builder: Builder, sizes: SizeSources, node: fx.Node, axes: Axes, target: Sequence[Axis]) -> fx.Node:
    """Rearrange ``node`` from ``axes`` to ``target``. Along atoms that ``node`` lacks, the result has size 1.

    The result is a view if the strides allow a view. Otherwise one copy is made.
    """
    own = flatten(axes)
    assert set(own) <= set(flatten(target)), "an atom would be lost"
    # A reshape to one dimension per atom also drops size-1 axes. If nothing else is needed, a squeeze is cheaper.
    if any(len(a) > 1 for a in axes):
        node = builder.call(aten.reshape.default, node, sizes.shape([(a,) for a in own]))
    else:
        empty = [k for k, a in enumerate(axes) if not a]
        if empty:
            node = builder.call(aten.squeeze.dims, node, empty)
    # The reshape skips atoms that the node lacks. An axis that has only such atoms is inserted later, with size 1.
    present = [tuple(a for a in axis if a in own) for axis in target]
    if any(len(a) > 1 for a in present):
        node = aligned(builder, node, own, flatten(present))
        return builder.call(aten.reshape.default, node, sizes.shape(present))
    return aligned(builder, node, own, [axis[0] if axis else None for axis in present])


def aligned(builder: Builder, node: fx.Node, own: Sequence[T], order: Sequence[T | None]) -> fx.Node:
    """Permute ``node`` from the dimensions ``own`` to ``order``, with size 1 for dimensions that ``own`` lacks."""
    permutation, missing = placed(own, order)
    if permutation != sorted(permutation):
        node = builder.call(aten.permute.default, node, permutation)
    for k in missing:
        node = builder.call(aten.unsqueeze.default, node, k)
    return node


def einsum(
    builder: Builder, a: fx.Node, a_atoms: Sequence[Atom], b: fx.Node, b_atoms: Sequence[Atom], out: Sequence[Atom]
) -> fx.Node:
    """Return ``a * b`` summed over every atom that is not in ``out``. Each tensor has one dimension per atom."""
    la, lb, lo = letters(a_atoms, b_atoms, out)
    return builder.call(aten.einsum.default, f"{la},{lb}->{lo}", [a, b])


def spread(builder: Builder, sizes: SizeSources, node: fx.Node, atoms: Sequence[Atom]) -> fx.Node:
    """Expand the size-1 axes of ``node`` to the sizes of their atoms. ``node`` has one axis per atom."""
    # A symbolic axis is never treated as an axis of size 1, even if its size is 1 in this call.
    short = [size(d) == 1 for d in val(node).shape]
    if not any(short):
        return node
    shape = [sizes.of(a) if one else -1 for a, one in zip(atoms, short, strict=True)]
    return builder.call(aten.expand.default, node, shape)


def same_layout(builder: Builder, new: fx.Node, old: fx.Node) -> fx.Node:
    """Return ``new`` in the dtype and memory order of ``old``. Views that were traced on ``old`` stay valid."""
    new = builder.cast(new, val(old).dtype)
    stride, wanted = val(new).stride(), val(old).stride()
    sizes = val(old).shape
    relevant = [d for d in range(len(sizes)) if size(sizes[d]) != 1]
    if all(size(stride[d]) == size(wanted[d]) for d in relevant):
        return new
    # The axes are sorted outermost first. Axes of size 1 may be anywhere.
    order = sorted(relevant, key=lambda d: hint(size(wanted[d]), wanted[d]), reverse=True)
    order = [d for d in range(len(sizes)) if d not in relevant] + order
    inverse = [order.index(d) for d in range(len(sizes))]
    # `clone` alone would keep the strides of `new`. The tensor is therefore permuted to the wanted order, made
    # contiguous and permuted back. The result has the strides of `old`.
    new = builder.call(aten.permute.default, new, order)
    new = builder.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    return builder.call(aten.permute.default, new, inverse)
