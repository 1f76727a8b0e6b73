"""Axes as products of atoms.

A reshape merges and splits axes. To know that the 24 columns of a ``[B, T, 4*6]`` tensor are "head, then feature", one
has to follow the factors, not the axes. An axis is therefore a row-major product of *atoms*, as in einops' ``(h d)``; a
size-1 axis is the empty product. Atoms are compared by identity, never by size, so equal sizes cannot be confused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
        # Cached, because two tensors that share the atom are split separately and have to share the parts afterwards.
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
    """Return the permutation from dimensions ``own`` to ``order``, and the positions in it that ``own`` lacks."""
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
    """Return the size of an axis of a weight, which is never symbolic."""
    size = axis_size(axis)
    assert isinstance(size, int), "weights have fixed sizes"
    return size


def regroup(atoms: Sequence[Atom], sizes: Sequence[Size]) -> tuple[Axes, Split] | None:
    """Reshape a product of atoms, in row-major order, to axes of the given sizes; return these and the atoms it split.

    None if the boundaries do not fall on whole factors (a reshape of ``[6]`` to ``[4, ...]``).
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
            # The atom extends past the axis: its outer part ends this axis, and its inner part begins the next
            # (row-major).
            inner = quotient(atom.size, need)
            if inner is None:
                return None
            split[atom] = atom.split(need, inner)
            taken.append(split[atom][0])
            queue.insert(0, split[atom][1])
            need = 1
        axes.append(tuple(taken))
    # If atoms are left over, the sizes do not multiply to the whole, as with symbols that only a guard relates.
    return (tuple(axes), split) if not queue else None


def common_factors(one: Axis, other: Axis) -> tuple[Split, Split] | None:
    """Return the splits that make two factorizations of one axis agree; None if there are none."""
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
    # One side has factors that the other lacks, so these are not two factorizations of one axis.
    return None if first or second else splits
