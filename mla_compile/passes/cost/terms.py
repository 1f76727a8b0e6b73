"""Chooses how to multiply by a weight that is a sum of products, such as W + B A of an adapter.

Before::

    x (W + s B A)            # each call writes and reads B A, which is as large as W, then writes and reads the sum

After::

    x W + (x s B) A          # for few rows x: the narrow products cost next to nothing

Both forms are equal up to rounding. The number of rows, taken from the trace, decides which form needs fewer
multiply-adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from mla_compile.passes.ir.axes import Atom, fixed_size
from mla_compile.passes.ir.expr import Factor
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.sizes import hint, size


class Contraction(NamedTuple):
    """A step of a product: the factor to multiply by, the atoms of the result, and the number of multiply-adds."""

    factor: Factor
    out: tuple[Atom, ...]
    operations: int


def pays(x: fx.Node, atoms: Sequence[Atom], weight: Factor, out: Sequence[Atom]) -> bool:
    """Whether multiplying ``x`` by each term of ``weight`` takes fewer multiply-adds than adding up the terms first."""
    if not weight.terms:
        return False
    separate = sum(step.operations for term in weight.terms for step in cheapest(x, atoms, term, out))
    return separate < _added_up(weight) + _product(_sizes(x, atoms), (*atoms, *weight.atoms))


def cheapest(x: fx.Node, atoms: Sequence[Atom], term: Sequence[Factor], out: Sequence[Atom]) -> tuple[Contraction, ...]:
    """Return the products of ``x`` with the factors of ``term``, one after another, in the cheapest order."""
    sizes = _sizes(x, atoms)
    orders = (tuple(_steps(sizes, atoms, order, out)) for order in itertools.permutations(term))
    return min(orders, key=lambda steps: sum(step.operations for step in steps))


def _steps(
    sizes: Mapping[Atom, int], atoms: Sequence[Atom], order: Sequence[Factor], out: Sequence[Atom]
) -> Iterable[Contraction]:
    for k, factor in enumerate(order):
        later = order[k + 1 :]
        wanted = {*out, *(a for f in later for a in f.atoms)}
        left = tuple(a for a in dict.fromkeys((*atoms, *factor.atoms)) if a in wanted) if later else tuple(out)
        yield Contraction(factor, left, _product(sizes, (*atoms, *factor.atoms)))
        atoms = left


def _added_up(weight: Factor) -> int:
    """Return the multiply-adds that compute the weight: first the products, then their sum."""
    whole = math.prod(weight.expr.shape)
    products = sum(_product({}, [a for f in term for a in f.atoms]) for term in weight.terms if len(term) > 1)
    return products + whole * (len(weight.terms) - 1)


def _sizes(x: fx.Node, atoms: Sequence[Atom]) -> dict[Atom, int]:
    return {a: hint(size(d), d) for a, d in zip(atoms, val(x).shape, strict=True)}


def _product(sizes: Mapping[Atom, int], atoms: Iterable[Atom]) -> int:
    return math.prod(sizes[a] if a in sizes else fixed_size([a]) for a in dict.fromkeys(atoms))
