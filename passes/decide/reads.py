"""The rows that the keys and values of an attention show, found through views, casts and joins of columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

from mla_compile.passes.attention.site import Operand
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, regroup
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.operators import (
    Broadcast,
    Copy,
    Join,
    Permute,
    Regroup,
    Repeat,
    Select,
    Slice,
    Write,
    decode,
)
from mla_compile.passes.ir.sizes import Size, same, same_sizes

COLUMNS = "columns"
Role: TypeAlias = "Axis | str"
"""What a dimension of K or V is: an axis of the site, or the columns of a row."""
_Cut: TypeAlias = "tuple[Role, object]"


@dataclass(frozen=True)
class ColumnRead:
    """Columns ``start`` to ``stop`` of ``rows``, sliced by ``cuts``; ``roles``: the roles of the dimensions."""

    rows: fx.Node
    cuts: tuple[_Cut, ...]
    start: int
    stop: int
    roles: tuple[Role, ...] = field(default=(), compare=False)

    def within(self, others: Iterable[ColumnRead]) -> bool:
        """Whether ``others`` together read every column of this one."""
        alike = [o for o in others if self.rows is o.rows and self.cuts == o.cuts and self._lies_like(o)]
        covered = self.start
        for other in sorted(alike, key=lambda o: o.start):
            if other.start <= covered:
                covered = max(covered, other.stop)
        return self.stop <= covered

    def _lies_like(self, other: ColumnRead) -> bool:
        """Whether batch, tokens and columns are the same dimensions: equal sizes do not tell them apart."""
        dims = zip(self.roles, other.roles, shape(self.rows), strict=True)
        return all(a == b or same(length, 1) for a, b, length in dims)


def reads(operand: Operand, features: Axis, first: Mapping[fx.Node, fx.Node]) -> list[ColumnRead]:
    """Return the rows that an operand shows, found through views, casts and joins of columns."""
    roles: list[Role] = [COLUMNS if axis and set(axis) <= set(features) else axis for axis in operand.axes]
    width = [size for role, size in zip(roles, shape(operand.node), strict=True) if role == COLUMNS]
    if len(width) != 1 or not isinstance(width[0], int):
        return []
    return _behind(operand.node, roles, (), 0, width[0], first)


def _behind(
    node: fx.Node,
    roles: Sequence[Role],
    cuts: tuple[_Cut, ...],
    start: int,
    stop: int,
    first: Mapping[fx.Node, fx.Node],
) -> list[ColumnRead]:
    how = decode(node)
    if isinstance(how, Join) and roles[how.dim] == COLUMNS:
        found: list[ColumnRead] = []
        for part in how.parts:
            width = shape(part)[how.dim]
            if not isinstance(width, int):
                return []
            if start < width and stop > 0:
                found += _behind(part, roles, cuts, max(start, 0), min(stop, width), first)
            start, stop = start - width, stop - width
        return found
    if isinstance(how, Write) and roles[how.dim] == COLUMNS and how.taken is not None and how.taken.step == 1:
        at, end = how.taken.start, how.taken.stop
        found = _behind(how.base, roles, cuts, start, min(stop, at), first) if start < at else []
        if start < end and at < stop:
            found += _behind(how.x, roles, cuts, max(start, at) - at, min(stop, end) - at, first)
        return found + (_behind(how.base, roles, cuts, max(start, end), stop, first) if end < stop else [])
    if isinstance(how, Slice) and roles[how.dim] == COLUMNS and how.taken is not None and how.taken.step == 1:
        return _behind(how.x, roles, cuts, start + how.taken.start, stop + how.taken.start, first)
    if isinstance(how, Slice) and roles[how.dim] != COLUMNS and how.bounds is not None:
        bounds = tuple(first[b] if isinstance(b, fx.Node) else b for b in how.bounds)
        return _behind(how.x, roles, (*cuts, (roles[how.dim], bounds)), start, stop, first)
    if isinstance(how, Select) and same(shape(how.x)[how.dim], 1):
        return _behind(how.x, [*roles[: how.dim], (), *roles[how.dim :]], cuts, start, stop, first)
    if isinstance(how, (Copy, Permute, Broadcast, Repeat, Regroup)):
        before = _roles_before(how, node, roles)
        if before is not None:
            return _behind(how.x, before, cuts, start, stop, first)
    return [ColumnRead(first[node], cuts, start, stop, tuple(roles))]


def _roles_before(
    how: Copy | Permute | Broadcast | Repeat | Regroup, node: fx.Node, roles: Sequence[Role]
) -> list[Role] | None:
    """Return the roles of the dimensions of ``how.x``; None if they are unknown, or if its columns are different."""
    own, sizes = shape(how.x), shape(node)
    if isinstance(how, Permute):
        before: list[Role] = [()] * len(own)
        for role, dim in zip(roles, how.order, strict=True):
            before[dim] = role
        return before
    if isinstance(how, Copy) and len(own) == len(sizes):
        return list(roles)
    if isinstance(how, Regroup):
        return _regrouped(own, sizes, roles)
    if isinstance(how, (Broadcast, Repeat)):
        extra = len(sizes) - len(own)
        # Along a repeated axis, all rows are alike; repeated columns are not the row's own columns.
        inner = isinstance(how, Repeat) and how.interleaved
        triples = zip(roles[extra:], own, sizes[extra:], strict=True)
        before = [role if same(a, b) else _once(role, a, inner=inner) for role, a, b in triples]
        return before if COLUMNS in before else None
    return None


def _once(role: Role, size: Size, *, inner: bool) -> Role:
    """Return the factor of this size along which rows are not repeated; ``inner``: each row is repeated in place."""
    if isinstance(role, str) or same(size, 1):
        return ()
    parts = (role[:n] if inner else role[n:] for n in range(1, len(role)))
    return next((part for part in parts if same(axis_size(part), size)), ())


def _regrouped(own: Sequence[Size], sizes: Sequence[Size], roles: Sequence[Role]) -> list[Role] | None:
    """Return the roles of the axes before a view turned them into axes of ``sizes``."""
    # Axes of size 1 come and go.
    named = [role for role, s in zip(roles, sizes, strict=True) if not same(s, 1)]
    if same_sizes([s for s in own if not same(s, 1)], [s for s in sizes if not same(s, 1)]):
        left = iter(named)
        kept: list[Role] = [() if same(s, 1) else next(left) for s in own]
        return kept if COLUMNS in kept else None
    if () in named:
        return None
    width = next(s for role, s in zip(roles, sizes, strict=True) if role == COLUMNS)
    columns = Atom(width)
    found = regroup([a for role in roles for a in ((columns,) if isinstance(role, str) else role)], own)
    if found is None or found[1] or (columns,) not in found[0]:
        return None
    return [COLUMNS if axis == (columns,) else axis for axis in found[0]]
