"""Arithmetic on weight factors: tensors of weights whose dimensions are atoms."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from mla_compile.passes.ir.axes import Atom, Axis, axis_size, letters, placed
from mla_compile.passes.ir.expr import Expr, Factor

aten = torch.ops.aten

MOST_TERMS, MOST_FACTORS = 8, 4
"""The most terms that a factor records, and the most factors per term.

If there are more terms or factors (many adapters), only the sum of the terms is kept.
"""


def common_dtype(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    dtype = torch.promote_types(a.value.dtype, b.value.dtype)
    return a.cast(dtype), b.cast(dtype)


def product(a: Factor | None, b: Factor, drop: Collection[Atom] = ()) -> Factor:
    """Return ``a * b`` (only ``b`` if ``a`` is None), summed over the atoms in ``drop``."""
    if a is None:
        gone = [k for k, atom in enumerate(b.atoms) if atom in drop]
        rest = tuple(atom for atom in b.atoms if atom not in drop)
        return Factor(b.expr.call(aten.sum.dim_IntList, gone), rest) if gone else b
    # A dict keeps the order of the atoms; a set would order dimensions by address, differently in each run.
    union = dict.fromkeys((*a.atoms, *b.atoms))
    out = tuple(atom for atom in union if atom not in drop)
    terms = _few(tuple((*left, *right) for left in terms_of(a) for right in terms_of(b)))
    left, right = common_dtype(a.expr, b.expr)
    if not b.atoms and not drop:
        return Factor(left.call(aten.mul.Tensor, left, right), a.atoms, terms)
    la, lb, lo = letters(a.atoms, b.atoms, out)
    return Factor(left.call(aten.einsum.default, f"{la},{lb}->{lo}", [left, right]), out, terms)


def terms_of(f: Factor) -> tuple[tuple[Factor, ...], ...]:
    return f.terms or ((f,),)


def _few(terms: tuple[tuple[Factor, ...], ...]) -> tuple[tuple[Factor, ...], ...]:
    """Return ``terms``, or an empty tuple if there are too many of them to be useful."""
    return terms if len(terms) <= MOST_TERMS and all(len(term) <= MOST_FACTORS for term in terms) else ()


def aligned(f: Factor, atoms: Sequence[Atom]) -> Expr:
    """Return ``f`` with one dimension for each of ``atoms``, in order; the size is 1 for an atom that ``f`` lacks."""
    order, missing = placed(f.atoms, atoms)
    expr = f.expr.permute(order)
    # `missing` is ascending, so each insertion is at its final place.
    sizes = list(expr.shape)
    for k in missing:
        sizes.insert(k, 1)
    return expr.view(sizes)


def total(a: Factor | None, b: Factor | None, alpha: float = 1.0) -> Factor | None:
    """Return ``a + alpha * b``."""
    if b is None:
        return a
    if a is None:
        return b if alpha == 1.0 else scaled(b, alpha)
    atoms = tuple(dict.fromkeys((*a.atoms, *b.atoms)))
    left, right = common_dtype(aligned(a, atoms), aligned(b, atoms))
    # If a tensor lacks an atom, a later sum over this atom would count the tensor's terms only once. The terms are
    # therefore dropped.
    alike = len(a.atoms) == len(b.atoms) == len(atoms)
    terms = _few((*terms_of(a), *terms_of(scaled(b, alpha)))) if alike else ()
    return Factor(left.call(aten.add.Tensor, left, right, alpha=alpha), atoms, terms)


def scaled(f: Factor, by: float) -> Factor:
    if by == 1.0:
        return f
    terms = tuple(_with_smallest(term, lambda one: scaled(one, by)) for term in f.terms)
    return Factor(f.expr.call(aten.mul.Tensor, by), f.atoms, terms)


def _with_smallest(term: tuple[Factor, ...], fn: Callable[[Factor], Factor]) -> tuple[Factor, ...]:
    at = min(range(len(term)), key=lambda k: math.prod(term[k].expr.shape))
    return (*term[:at], fn(term[at]), *term[at + 1 :])


def merged(f: Factor, axis: Axis, into: Atom) -> Factor:
    """Merge the atoms of ``axis`` into one dimension ``into``. ``f`` must have all of these atoms."""
    if any(0 < len({*axis} & {*one.atoms}) < len(axis) for term in f.terms for one in term):
        f = replace(f, terms=())  # a factor of a term has only some of the atoms

    def merge(one: Factor) -> Factor:
        if axis[0] not in one.atoms:
            return one
        rest = tuple(a for a in one.atoms if a not in axis)
        expr = one.expr.permute([one.atoms.index(a) for a in (*axis, *rest)])
        return Factor(expr.view([-1, *expr.shape[len(axis) :]]), (into, *rest))

    return f.each(merge)


def narrowed(f: Factor, atom: Atom, into: Atom, start: int, stop: int, step: int = 1) -> Factor:
    """Slice the dimension ``atom`` with ``start:stop:step``. The new dimension is ``into``."""

    def narrow(one: Factor) -> Factor:
        if atom not in one.atoms:
            return one
        dim = one.atoms.index(atom)
        expr = (
            one.expr.slice(dim, start, stop) if step == 1 else one.expr.call(aten.slice.Tensor, dim, start, stop, step)
        )
        return Factor(expr, tuple(into if a is atom else a for a in one.atoms))

    return f.each(narrow)


def part_of(f: Factor, axis: Axis, into: Atom, taken: range) -> Factor:
    """Slice the positions ``taken`` from ``axis``, all of whose atoms must be dimensions of ``f``.

    The slice becomes one dimension with the atom ``into``. A slice of size 1 has no dimension.
    """
    whole = axis[0]
    if len(axis) > 1:
        whole = Atom(axis_size(axis))
        f = merged(f, axis, whole)
    f = narrowed(f, whole, into, taken.start, taken.stop, taken.step)
    return without(f, into) if into.size == 1 else f  # a size-1 axis has no atom


def without(f: Factor, atom: Atom) -> Factor:
    """Drop the dimension ``atom``, which has size 1."""

    def drop(one: Factor) -> Factor:
        kept = [k for k, a in enumerate(one.atoms) if a is not atom]
        return Factor(one.expr.view([one.expr.shape[k] for k in kept]), tuple(one.atoms[k] for k in kept))

    return f.each(drop)
