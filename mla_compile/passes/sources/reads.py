"""Find the columns of rows that make up K and V. Views, casts, slices and joins are looked through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

from mla_compile.passes.attention.site import Operand
from mla_compile.passes.ir.axes import Atom, Axis
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.moves import Along, Copy, Rearrange, Repeat, Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same

COLUMNS = "columns"
Role: TypeAlias = "Axis | str"
"""The role of a dimension of K or V: an axis of the site, or ``COLUMNS``, the columns of a row."""
_Cut: TypeAlias = "tuple[Role, object]"


@dataclass(frozen=True)
class ColumnRead:
    """Columns ``start`` to ``stop`` of ``rows``, after the slices ``cuts`` along other axes.

    ``roles``: the role of each dimension of ``rows``.
    """

    rows: fx.Node
    cuts: tuple[_Cut, ...]
    start: int
    stop: int
    roles: tuple[Role, ...] = field(default=(), compare=False)

    def within(self, others: Iterable[ColumnRead]) -> bool:
        """Whether ``others`` together cover all columns of this read."""
        alike = [o for o in others if self.rows is o.rows and self.cuts == o.cuts and self._lies_like(o)]
        covered = self.start
        for other in sorted(alike, key=lambda o: o.start):
            if other.start <= covered:
                covered = max(covered, other.stop)
        return self.stop <= covered

    def _lies_like(self, other: ColumnRead) -> bool:
        """Whether each dimension longer than 1 has equal roles in both reads; equal sizes do not prove equal roles."""
        dims = zip(self.roles, other.roles, shape(self.rows), strict=True)
        return all(a == b or same(length, 1) for a, b, length in dims)


def reads(operand: Operand, features: Axis, first: Mapping[fx.Node, fx.Node]) -> list[ColumnRead]:
    """Return the column reads that make up ``operand``; empty unless the features are one axis of fixed width.

    ``first``: maps each node to the first node that computes the same value.
    """
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
    if isinstance(how, Along) and roles[how.dim] == COLUMNS and how.axis_parts is not None:
        found: list[ColumnRead] = []
        for part in how.axis_parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                by = part.offset - part.start
                found += _behind(part.node, roles, cuts, low + by, high + by, first)
        return found
    if isinstance(how, Slice) and roles[how.dim] != COLUMNS and how.bounds is not None:
        bounds = tuple(first[b] if isinstance(b, fx.Node) else b for b in how.bounds)
        return _behind(how.x, roles, (*cuts, (roles[how.dim], bounds)), start, stop, first)
    if isinstance(how, Select) and same(shape(how.x)[how.dim], 1):
        return _behind(how.x, [*roles[: how.dim], (), *roles[how.dim :]], cuts, start, stop, first)
    if isinstance(how, Copy):
        return _behind(how.x, roles, cuts, start, stop, first)
    before = _roles_before(how, node, roles) if isinstance(how, Rearrange) else None
    if isinstance(how, Rearrange) and before is not None:
        return _behind(how.x, before, cuts, start, stop, first)
    return [ColumnRead(first[node], cuts, start, stop, tuple(roles))]


def _roles_before(how: Rearrange, node: fx.Node, roles: Sequence[Role]) -> list[Role] | None:
    """Return the roles of the dimensions of ``how.x``, the operand of ``node``.

    Return None if the roles are unknown, or if no dimension holds exactly the columns.
    """
    if how.map is None:
        return None
    columns: Axis = (Atom(next(s for role, s in zip(roles, shape(node), strict=True) if role == COLUMNS)),)
    axes = tuple(columns if isinstance(role, str) else role for role in roles)
    before = how.map.backward(axes)
    if before is None and isinstance(how, Repeat):  # the axes that are not repeated keep their roles
        kept = dict(zip(how.map.after, axes, strict=True))
        before = tuple(kept.get(own, ()) for own in how.map.before)
    return [COLUMNS if axis == columns else axis for axis in before] if before and columns in before else None
