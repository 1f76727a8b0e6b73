"""Arithmetic of weight factors: tensors of weights whose dimensions are atoms."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from mla_compile.passes.ir.axes import Atom, Axis, letters, placed
from mla_compile.passes.ir.expr import Expr, Factor

aten = torch.ops.aten


def common_dtype(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    dtype = torch.promote_types(a.value.dtype, b.value.dtype)
    return a.cast(dtype), b.cast(dtype)


def product(a: Factor | None, b: Factor, drop: Collection[Atom] = ()) -> Factor:
    """``a * b`` summed over the atoms in ``drop``."""
    if a is None:
        gone = [k for k, atom in enumerate(b.atoms) if atom in drop]
        rest = tuple(atom for atom in b.atoms if atom not in drop)
        return Factor(b.expr.call(aten.sum.dim_IntList, gone), rest) if gone else b
    # A dict, as its order is that of the atoms: a set would order the dimensions by address, differently in each run.
    union = dict.fromkeys((*a.atoms, *b.atoms))
    out = tuple(atom for atom in union if atom not in drop)
    left, right = common_dtype(a.expr, b.expr)
    if not b.atoms and not drop:
        return Factor(left.call(aten.mul.Tensor, left, right), a.atoms)
    la, lb, lo = letters(a.atoms, b.atoms, out)
    return Factor(left.call(aten.einsum.default, f"{la},{lb}->{lo}", [left, right]), out)


def aligned(f: Factor, atoms: Sequence[Atom]) -> Expr:
    """``f`` with a dimension for each of ``atoms``, in their order; of size 1 for an atom that ``f`` does not have."""
    order, missing = placed(f.atoms, atoms)
    expr = f.expr.permute(order)
    # `missing` is ascending, so each insertion is at its final place at once.
    sizes = list(expr.shape)
    for k in missing:
        sizes.insert(k, 1)
    return expr.view(sizes)


def total(a: Factor | None, b: Factor | None, alpha: float = 1.0) -> Factor | None:
    """``a + alpha * b``."""
    if b is None:
        return a
    if a is None:
        return b if alpha == 1.0 else scaled(b, alpha)
    atoms = tuple(dict.fromkeys((*a.atoms, *b.atoms)))
    left, right = common_dtype(aligned(a, atoms), aligned(b, atoms))
    return Factor(left.call(aten.add.Tensor, left, right, alpha=alpha), atoms)


def scaled(f: Factor, by: float) -> Factor:
    return f if by == 1.0 else Factor(f.expr.call(aten.mul.Tensor, by), f.atoms)


def merged(f: Factor, axis: Axis, into: Atom) -> Factor:
    """``f`` with the atoms of ``axis``, all of which it has, as one dimension ``into``."""
    rest = tuple(a for a in f.atoms if a not in axis)
    expr = f.expr.permute([f.atoms.index(a) for a in (*axis, *rest)])
    return Factor(expr.view([-1, *expr.shape[len(axis) :]]), (into, *rest))


def narrowed(f: Factor, atom: Atom, into: Atom, start: int, stop: int, step: int = 1) -> Factor:
    """``f`` with rows ``start:stop:step`` of ``atom``, which is then called ``into``."""
    dim = f.atoms.index(atom)
    expr = f.expr.slice(dim, start, stop) if step == 1 else f.expr.call(aten.slice.Tensor, dim, start, stop, step)
    return Factor(expr, tuple(into if a is atom else a for a in f.atoms))
