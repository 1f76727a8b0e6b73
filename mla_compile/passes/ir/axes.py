"""Axes as products of atoms.

A reshape merges and splits axes. To know that the 24 columns of a ``[B, T, 4*6]`` tensor are "head, then feature", an
analysis follows their factors. An axis is therefore a row-major product of *atoms*, as in einops' ``(h d)``. A size-1
axis is the empty product. Atoms are compared by identity, never by size, so equal sizes cannot be confused.

An :class:`IndexMap` says where a rearranging operator moves each position. It gives the axes before and after the
operator as products of the same atoms (einops' ``a (b c) -> c (a b r)``). The position along each atom stays the same.
Values repeat along an atom that is only in the result. From the axes on one side of the operator, the map gives the
axes on the other side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters
from typing import TypeAlias, TypeVar

from mla_compile.passes.ir.sizes import Size, quotient, same

T = TypeVar("T")


class Atom:
    """One factor of an axis. Splitting an atom twice in the same way returns the same two atoms."""

    __slots__ = ("size", "splits")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.splits: dict[Size, tuple[Atom, Atom]] = {}

    def split(self, outer: Size, inner: Size) -> tuple[Atom, Atom]:
        # Splits are cached because tensors that share an atom are split one by one and must share the new atoms too.
        if outer not in self.splits:
            self.splits[outer] = (Atom(outer), Atom(inner))
        return self.splits[outer]


Axis: TypeAlias = "tuple[Atom, ...]"
Axes: TypeAlias = "tuple[Axis, ...]"
Split: TypeAlias = "dict[Atom, tuple[Atom, ...]]"


def fresh_axis(size: Size) -> Axis:
    return () if same(size, 1) else (Atom(size),)


def fresh_axes(shape: Iterable[Size]) -> Axes:
    return tuple(fresh_axis(s) for s in shape)


def flatten(axes: Iterable[Axis]) -> Axis:
    return tuple(atom for one in axes for atom in one)


def letters(*groups: Sequence[Atom]) -> list[str]:
    """Return einsum subscripts with one letter for each distinct atom."""
    names: dict[Atom, str] = {}
    return ["".join(names.setdefault(a, ascii_letters[len(names)]) for a in group) for group in groups]


def placed(own: Sequence[T], order: Sequence[T | None]) -> tuple[list[int], list[int]]:
    """Return the permutation of ``own`` that gives ``order``, and the positions in ``order`` that ``own`` lacks."""
    return [own.index(a) for a in order if a in own], [k for k, a in enumerate(order) if a not in own]


def substitute(axis: Axis, split: Mapping[Atom, tuple[Atom, ...]]) -> Axis:
    """Replace every atom of ``axis`` that is in ``split`` by its parts, recursively."""
    out: list[Atom] = []
    for atom in axis:
        out.extend(substitute(split[atom], split) if atom in split else (atom,))
    return tuple(out)


def axis_size(axis: Iterable[Atom]) -> Size:
    return math.prod(atom.size for atom in axis)


def fixed_size(axis: Iterable[Atom]) -> int:
    """Return the size of a weight's axis. Weights never have symbolic sizes."""
    size = axis_size(axis)
    assert isinstance(size, int), "weights have fixed sizes"
    return size


def regroup(atoms: Sequence[Atom], sizes: Sequence[Size]) -> tuple[Axes, Split] | None:
    """Reshape a row-major product of atoms to axes of the given sizes; return the axes and the splits of atoms.

    Return None if an axis would end inside an atom that cannot be split there. Example: ``[6]`` to ``[4, ...]``.
    """
    queue = list(atoms)
    split: Split = {}
    axes: list[Axis] = []
    for target in sizes:
        need: Size = target
        taken: list[Atom] = []
        while not same(need, 1):
            if not queue:
                return None
            atom = queue.pop(0)
            if same(need, atom.size):
                taken.append(atom)
                break
            rest = quotient(need, atom.size)
            if rest is not None:
                taken.append(atom)
                need = rest
                continue
            # The atom extends past the axis. Its outer factor ends this axis, and its inner factor begins the next
            # axis.
            inner = quotient(atom.size, need)
            if inner is None:
                return None
            split[atom] = atom.split(need, inner)
            taken.append(split[atom][0])
            queue.insert(0, split[atom][1])
            need = 1
        axes.append(tuple(taken))
    # If atoms are left over, the sizes are not proved to cover the whole tensor.
    return (tuple(axes), split) if not queue else None


def common_factors(one: Axis, other: Axis) -> tuple[Split, Split] | None:
    """Return the splits that make two factorizations of one axis agree; None if no splits do."""
    first, second = list(one), list(other)
    splits: tuple[Split, Split] = {}, {}
    while first and second:
        a, b = first.pop(0), second.pop(0)
        if same(a.size, b.size):
            continue
        if (rest := quotient(a.size, b.size)) is not None:
            splits[0][a] = a.split(b.size, rest)
            first.insert(0, splits[0][a][1])
        elif (rest := quotient(b.size, a.size)) is not None:
            splits[1][b] = b.split(a.size, rest)
            second.insert(0, splits[1][b][1])
        else:
            return None
    # If one side has factors left, these are not two factorizations of one axis.
    return None if first or second else splits


@dataclass(frozen=True)
class IndexMap:
    """The axes of an operand (``before``) and of the operator's result (``after``), in common atoms.

    ``after`` has each atom of ``before`` exactly once.
    """

    before: Axes
    after: Axes

    def forward(self, axes: Axes) -> tuple[Axes, Split] | None:
        """Return the axes of the result for an operand with ``axes``, and the splits of atoms that this requires.

        Each call makes new atoms for repeated values. Return None if a boundary of the result cuts through an atom.
        """
        return _carried(self.before, self.after, axes)

    def backward(self, axes: Axes) -> Axes | None:
        """Return the axes of the operand for a result with ``axes``; None if this would split an atom of ``axes``."""
        carried = _carried(self.after, self.before, axes)
        return None if carried is None or carried[1] else carried[0]

    def then(self, other: IndexMap) -> IndexMap | None:
        """Return this map followed by ``other``; None if their axes do not have common factors."""
        carried = other.forward(self.after)
        return None if carried is None else IndexMap(tuple(substitute(a, carried[1]) for a in self.before), carried[0])

    def kept(self, dim: int) -> int | None:
        """Return the axis of the result that equals axis ``dim`` of the operand; None if there is no such axis."""
        return next((k for k, axis in enumerate(self.after) if axis == self.before[dim]), None)

    def read_along(self, dim: int) -> list[int]:
        """Return the axes of the operand that share an atom with axis ``dim`` of the result."""
        return [k for k, own in enumerate(self.before) if set(own) & set(self.after[dim])]


def _carried(own: Axes, other: Axes, axes: Axes) -> tuple[Axes, Split] | None:
    """Return ``other`` with the atoms of ``own`` replaced by the atoms of ``axes``, and the necessary splits."""
    found: dict[Atom, Axis] = {}
    split: Split = {}
    spare: Axis = ()
    for known, given in zip(own, axes, strict=True):
        factors = [atom for atom in known if atom.size != 1]
        given = (*spare, *given)
        spare = () if known else given  # atoms given for an empty axis have size 1 and move to the next axis
        found |= dict.fromkeys(known, ())
        if len(factors) == 1 or len(known) == 1:  # the axis moves as a whole, even if a segment has another width
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
    return tuple(flatten([found[atom] for atom in axis]) for axis in other), split


@lru_cache(maxsize=4096)
def permuted(sizes: tuple[Size, ...], order: tuple[int, ...]) -> IndexMap:
    own = _whole(sizes)
    return IndexMap(own, tuple(own[d] for d in order))


@lru_cache(maxsize=4096)
def reshaped(old: tuple[Size, ...], new: tuple[Size, ...]) -> IndexMap | None:
    """Return the map of a reshape; None if a boundary of a new axis cuts through a factor of an old axis."""
    own = fresh_axes(old)
    found = regroup(flatten(own), new)
    return None if found is None else IndexMap(tuple(substitute(a, found[1]) for a in own), found[0])


@lru_cache(maxsize=4096)
def expanded(old: tuple[Size, ...], new: tuple[Size, ...]) -> IndexMap:
    """Return the map of a broadcast, in which axes of size 1 grow and new axes come in front."""
    lead = len(new) - len(old)
    grows = [same(a, 1) and not same(b, 1) for a, b in zip(old, new[lead:], strict=True)]
    own = tuple(() if grown else axis for axis, grown in zip(_whole(old), grows, strict=True))
    kept = (fresh_axis(s) if grown else a for a, s, grown in zip(own, new[lead:], grows, strict=True))
    return IndexMap(own, (*fresh_axes(new[:lead]), *kept))


@lru_cache(maxsize=4096)
def repeated(sizes: tuple[Size, ...], counts: tuple[int, ...], *, interleaved: bool) -> IndexMap:
    """Return the map of a repeat, with one count for each axis of the result.

    ``interleaved``: repeat each position. Otherwise, repeat the axis as a whole.
    """
    own = _whole(sizes)
    axes = (*[()] * (len(counts) - len(own)), *own)
    # Interleaved copies are the inner factor of the axis; whole repetitions are the outer factor.
    pairs = [(fresh_axis(n), a) for n, a in zip(counts, axes, strict=True)]
    return IndexMap(own, tuple((*a, *copies) if interleaved else (*copies, *a) for copies, a in pairs))


def _whole(sizes: Sequence[Size]) -> Axes:
    return tuple((Atom(s),) for s in sizes)
