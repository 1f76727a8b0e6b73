"""What an operator that rearranges axes does to positions, once for every analysis.

As in einops' ``a (b c) -> c (a r)``, the axes of a tensor before and after are products of the same atoms, and the
position along each atom stays what it is. An atom that only the result has repeats values. An analysis carries the axes
that it knows of one side to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mla_compile.passes.ir.axes import (
    Atom,
    Axes,
    Axis,
    Split,
    common_factors,
    flatten,
    fresh_axes,
    fresh_axis,
    regroup,
    substitute,
)
from mla_compile.passes.ir.sizes import Size, same


@dataclass(frozen=True)
class IndexMap:
    """The axes of a tensor ``before`` an operator and ``after`` it; every atom of ``before`` is once in ``after``."""

    before: Axes
    after: Axes

    def forward(self, axes: Axes) -> tuple[Axes, Split] | None:
        """Return the result's axes in the atoms of ``axes``, the tensor's, and the atoms of these that are split.

        Every call makes new atoms for what is repeated. None if a boundary of the result cuts through an atom.
        """
        return _carried(self.before, self.after, axes)

    def backward(self, axes: Axes) -> Axes | None:
        """Return the tensor's axes in the atoms of ``axes``, the result's; None if an atom would have to be split."""
        carried = _carried(self.after, self.before, axes)
        return None if carried is None or carried[1] else carried[0]

    def then(self, other: IndexMap) -> IndexMap | None:
        """Return this map followed by ``other``; None if their axes do not have common factors."""
        carried = other.forward(self.after)
        return None if carried is None else IndexMap(tuple(substitute(a, carried[1]) for a in self.before), carried[0])

    def kept(self, dim: int) -> int | None:
        """Return the axis of the result that is axis ``dim`` of the tensor, whole and alone; None if none is."""
        return next((k for k, axis in enumerate(self.after) if axis == self.before[dim]), None)

    def read_along(self, dim: int) -> list[int]:
        """Return the axes of the tensor whose position depends on the position along axis ``dim`` of the result."""
        return [k for k, own in enumerate(self.before) if set(own) & set(self.after[dim])]


def _carried(own: Axes, other: Axes, axes: Axes) -> tuple[Axes, Split] | None:
    """Return the axes ``other``, where the axes ``own`` are ``axes``, and the atoms of ``axes`` that are split."""
    found: dict[Atom, Axis] = {}
    split: Split = {}
    spare: Axis = ()
    for known, given in zip(own, axes, strict=True):
        factors = [atom for atom in known if atom.size != 1]
        given = (*spare, *given)
        spare = () if known else given  # an atom of size 1 moves with the next axis
        found |= dict.fromkeys(known, ())
        if len(factors) == 1 or len(known) == 1:  # moved as a whole, whatever its factors and its width in a segment
            found[(factors or known)[0]] = given
        elif known:
            cuts = common_factors(tuple(factors), given)
            if cuts is None:
                return None
            split |= cuts[1]
            parts = iter(substitute(given, cuts[1]))
            found |= {atom: tuple(next(parts) for _ in substitute((atom,), cuts[0])) for atom in factors}
    if spare:
        return None
    found |= {atom: fresh_axis(atom.size) for atom in flatten(other) if atom not in found}
    return tuple(substitute(axis, found) for axis in other), split


def permuted(sizes: Sequence[Size], order: Sequence[int]) -> IndexMap:
    own = _whole(sizes)
    return IndexMap(own, tuple(own[d] for d in order))


@lru_cache(maxsize=4096)
def reshaped(old: tuple[Size, ...], new: tuple[Size, ...]) -> IndexMap | None:
    """Return the map of a reshape; None if a boundary of the new axes cuts through a factor of an old one."""
    own = fresh_axes(old)
    found = regroup(flatten(own), new)
    return None if found is None else IndexMap(tuple(substitute(a, found[1]) for a in own), found[0])


def expanded(old: Sequence[Size], new: Sequence[Size]) -> IndexMap:
    """Return the map of a broadcast, in which axes of size 1 grow and new axes come in front."""
    lead = len(new) - len(old)
    grows = [same(a, 1) and not same(b, 1) for a, b in zip(old, new[lead:], strict=True)]
    own = tuple(() if grown else axis for axis, grown in zip(_whole(old), grows, strict=True))
    kept = (fresh_axis(s) if grown else a for a, s, grown in zip(own, new[lead:], grows, strict=True))
    return IndexMap(own, (*fresh_axes(new[:lead]), *kept))


def repeated(sizes: Sequence[Size], counts: Sequence[int], *, interleaved: bool) -> IndexMap:
    """Return the map of a repetition ``counts`` times along each axis: of each position, or of the whole axis."""
    own = _whole(sizes)
    axes = (*[()] * (len(counts) - len(own)), *own)
    # Interleaved copies are the inner factor of the axis; whole repetitions are the outer factor.
    pairs = [(fresh_axis(n), a) for n, a in zip(counts, axes, strict=True)]
    return IndexMap(own, tuple((*a, *copies) if interleaved else (*copies, *a) for copies, a in pairs))


def _whole(sizes: Sequence[Size]) -> Axes:
    return tuple((Atom(s),) for s in sizes)
