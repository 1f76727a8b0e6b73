"""einops-style rearrangement: a node whose axes are products of atoms, in another order and grouping."""

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


class Sizes:
    """Where the size of an atom can be read: from the atom itself, or from an axis of a known tensor."""

    def __init__(self, builder: Builder, operands: Iterable[tuple[fx.Node, Axes]]) -> None:
        self.builder = builder
        self._at: dict[Atom, tuple[fx.Node, int]] = {}
        self._nodes: dict[Atom, Dim] = {}
        for node, axes in operands:
            for dim, axis in enumerate(axes):
                if len(axis) == 1:
                    # Only a one-atom axis shows its atom's size: `sym_size` of a merged axis is the product.
                    self._at.setdefault(axis[0], (node, dim))

    def show(self, axis: Axis, node: fx.Node, dim: int) -> None:
        """Says that the size of ``axis``, of one atom or none, can be read from ``node`` too."""
        for atom in axis:
            self._at.setdefault(atom, (node, dim))

    def of(self, atom: Atom) -> Dim:
        """The atom's size as an argument; -1 where no tensor shows it (one such per reshape can be inferred)."""
        if isinstance(atom.size, int):
            return atom.size
        if atom not in self._nodes:
            self._nodes[atom] = self.builder.size(*self._at[atom]) if atom in self._at else -1
        return self._nodes[atom]

    def shape(self, axes: Sequence[Axis]) -> list[Dim]:
        """The shape of a tensor with these axes; a product with a symbolic factor is left to be inferred."""
        dims: list[Dim] = []
        for axis in axes:
            total = axis_size(axis)
            if isinstance(total, int):
                dims.append(total)
            else:
                dims.append(self.of(axis[0]) if len(axis) == 1 else -1)
        for k, axis in enumerate(axes):
            if dims[k] == -1 and dims.count(-1) > 1:  # a reshape infers one size, not two
                dims[k] = self._product(axis)
        return dims

    def _product(self, axis: Axis) -> Dim:
        total: Dim = 1
        for atom in axis:
            one = self.of(atom)
            total = self.builder.call(operator.mul, total, one) if total != 1 else one
        return total


def arrange(builder: Builder, sizes: Sizes, node: fx.Node, axes: Axes, target: Sequence[Axis]) -> fx.Node:
    """``node`` with axes ``axes`` as a tensor with axes ``target``; atoms it lacks give size-1 axes.

    Views where strides allow, one copy where they do not.
    """
    own = flatten(axes)
    assert set(own) <= set(flatten(target)), "an atom would be lost"
    # A reshape to one dimension per atom drops size-1 axes as well; a squeeze is the cheaper way to do only that.
    if any(len(a) > 1 for a in axes):
        node = builder.call(aten.reshape.default, node, sizes.shape([(a,) for a in own]))
    else:
        empty = [k for k, a in enumerate(axes) if not a]
        if empty:
            node = builder.call(aten.squeeze.dims, node, empty)
    # Atoms that the node lacks are left out before the reshape and come back as axes of size 1: they broadcast.
    present = [tuple(a for a in axis if a in own) for axis in target]
    if any(len(a) > 1 for a in present):
        node = aligned(builder, node, own, flatten(present))
        return builder.call(aten.reshape.default, node, sizes.shape(present))
    return aligned(builder, node, own, [axis[0] if axis else None for axis in present])


def aligned(builder: Builder, node: fx.Node, own: Sequence[T], order: Sequence[T | None]) -> fx.Node:
    """``node``, with dimensions called ``own``, as a tensor with dimensions ``order``, of size 1 where it lacks one."""
    permutation, missing = placed(own, order)
    if permutation != sorted(permutation):
        node = builder.call(aten.permute.default, node, permutation)
    for k in missing:
        node = builder.call(aten.unsqueeze.default, node, k)
    return node


def einsum(
    builder: Builder, a: fx.Node, a_atoms: Sequence[Atom], b: fx.Node, b_atoms: Sequence[Atom], out: Sequence[Atom]
) -> fx.Node:
    """``a b`` summed over every atom that is not in ``out``; operands and result have one dimension for each atom."""
    la, lb, lo = letters(a_atoms, b_atoms, out)
    return builder.call(aten.einsum.default, f"{la},{lb}->{lo}", [a, b])


def spread(builder: Builder, sizes: Sizes, node: fx.Node, atoms: Sequence[Atom]) -> fx.Node:
    """``node``, one axis per atom, with axes of size 1 expanded to the sizes of their atoms."""
    # A symbolic axis never counts as size 1 here, whatever its size in this call.
    short = [size(d) == 1 for d in val(node).shape]
    if not any(short):
        return node
    shape = [sizes.of(a) if one else -1 for a, one in zip(atoms, short, strict=True)]
    return builder.call(aten.expand.default, node, shape)


def same_layout(builder: Builder, new: fx.Node, old: fx.Node) -> fx.Node:
    """``new`` in the dtype and memory order of ``old``: views that were traced on the old node's strides stay valid."""
    new = builder.cast(new, val(old).dtype)
    stride, wanted = val(new).stride(), val(old).stride()
    sizes = val(old).shape
    relevant = [d for d in range(len(sizes)) if size(sizes[d]) != 1]
    if all(size(stride[d]) == size(wanted[d]) for d in relevant):
        return new
    # Outermost first; size-1 axes may stand anywhere.
    order = sorted(relevant, key=lambda d: hint(size(wanted[d]), wanted[d]), reverse=True)
    order = [d for d in range(len(sizes)) if d not in relevant] + order
    inverse = [order.index(d) for d in range(len(sizes))]
    # `clone` alone would keep the strides it finds. Permuted to the wanted order, made contiguous there and permuted
    # back, the tensor has the strides of `old`, and a `view` that was legal on `old` stays legal.
    new = builder.call(aten.permute.default, new, order)
    new = builder.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    return builder.call(aten.permute.default, new, inverse)
