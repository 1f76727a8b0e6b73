"""Records of operators that move values without computing any. A record says where the result's values come from.

A rearrangement has an index map. An operator that works along one axis has parts: each part says which positions of the
axis come from which tensor. Analyses read index maps and parts, not operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import fx

from mla_compile.passes.ir.axes import IndexMap
from mla_compile.passes.ir.graph import shape

Told: TypeAlias = "int | fx.Node | None"
"""A position or a size as it is passed to an operator: a number, a node, or None."""


@dataclass(frozen=True)
class Copy:
    """The values of ``x``, perhaps in other memory, another layout or another dtype."""

    x: fx.Node


@dataclass(frozen=True)
class Dropout:
    """``x`` after a dropout. Values are dropped only if ``active``."""

    x: fx.Node
    active: bool


@dataclass(frozen=True)
class Rearrange:
    """``x`` with its axes permuted, merged, split or repeated.

    ``index``: a function that makes the map when ``map`` is first read. ``told``: the sizes passed to the operator, if
    any.
    """

    x: fx.Node
    index: Callable[[], IndexMap | None] = field(compare=False, repr=False)
    told: Sequence[int | fx.Node] | None = None

    @cached_property
    def map(self) -> IndexMap | None:
        """The map between positions of ``x`` and of the result; None if a reshape cuts through a factor."""
        return self.index()


@dataclass(frozen=True)
class Reorder(Rearrange):
    """``x`` rearranged so that each of its values occurs exactly once in the result."""


@dataclass(frozen=True)
class Regroup(Reorder):
    """``x`` in another shape. Its values stay in the same row-major order."""


@dataclass(frozen=True)
class Permute(Reorder):
    """``x`` with its axes in another order."""


@dataclass(frozen=True)
class Repeat(Rearrange):
    """``x`` with copies of its values along some axes."""


@dataclass(frozen=True)
class Expand(Repeat):
    """``x`` broadcast to another shape: axes of size 1 grow, and new axes are added in front."""


@dataclass(frozen=True)
class AxisPart:
    """Positions ``start`` to ``stop`` of a result axis.

    The values come from axis ``dim`` of ``node``, beginning at position ``offset``.
    """

    start: int
    stop: int
    node: fx.Node
    dim: int
    offset: int = 0


class Along(ABC):
    """An operator that takes positions of ``operands`` along axis ``dim`` and keeps all other axes."""

    dim: int

    @property
    @abstractmethod
    def operands(self) -> tuple[fx.Node, ...]: ...

    @property
    @abstractmethod
    def axis_parts(self) -> tuple[AxisPart, ...] | None:
        """The parts of axis ``dim``; None if a position is only known at run time or a stride is not 1."""


@dataclass(frozen=True)
class Slice(Along):
    """Some positions of axis ``dim`` of ``x``.

    ``bounds``: the operator's start, stop and step arguments; None for a split or narrow at run-time positions.
    ``taken``: the positions, if all of them are known.
    """

    x: fx.Node
    dim: int
    bounds: tuple[Told, Told, Told] | None
    taken: range | None

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        return (self.x,)

    @property
    def axis_parts(self) -> tuple[AxisPart, ...] | None:
        if self.taken is None or self.taken.step != 1:
            return None
        return (AxisPart(0, len(self.taken), self.x, self.dim, self.taken.start),)


@dataclass(frozen=True)
class Select:
    """``x`` at position ``index`` (None if unknown) of axis ``dim``. The result lacks this axis."""

    x: fx.Node
    dim: int
    index: int | None


@dataclass(frozen=True)
class Join(Along):
    """``parts`` concatenated along axis ``dim``."""

    parts: tuple[fx.Node, ...]
    dim: int

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        return self.parts

    @property
    def axis_parts(self) -> tuple[AxisPart, ...] | None:
        found: list[AxisPart] = []
        stop = 0
        for x in self.parts:
            start, size = stop, shape(x)[self.dim]
            if not isinstance(size, int):
                return None
            stop += size
            found.append(AxisPart(start, stop, x, self.dim))
        return tuple(p for p in found if p.start < p.stop)


@dataclass(frozen=True)
class Stack:
    """``parts`` stacked along a new axis ``dim``."""

    parts: tuple[fx.Node, ...]
    dim: int


@dataclass(frozen=True)
class Assign:
    """``x``, broadcast to the shape of ``target`` and converted to the dtype of ``target``.

    The values of ``target`` are not read.
    """

    target: fx.Node
    x: fx.Node


@dataclass(frozen=True)
class Write(Along):
    """``base`` with ``x`` written to some positions of axis ``dim``.

    ``bounds`` and ``taken`` are as in :class:`Slice`.
    """

    base: fx.Node
    x: fx.Node
    dim: int
    bounds: tuple[Told, Told, Told]
    taken: range | None

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        return (self.base, self.x)

    @property
    def axis_parts(self) -> tuple[AxisPart, ...] | None:
        length = shape(self.base)[self.dim]
        if self.taken is None or self.taken.step != 1 or not isinstance(length, int):
            return None
        start, stop = (self.taken.start, self.taken.stop) if self.taken else (length, length)
        before, after = AxisPart(0, start, self.base, self.dim), AxisPart(stop, length, self.base, self.dim, stop)
        return tuple(p for p in (before, AxisPart(start, stop, self.x, self.dim), after) if p.start < p.stop)


@dataclass(frozen=True)
class WriteOne:
    """``base`` with ``x`` written to position ``index`` (None if unknown) of axis ``dim``."""

    base: fx.Node
    x: fx.Node
    dim: int
    index: int | None


@dataclass(frozen=True)
class WriteRows:
    """``base`` with ``x`` written to axis ``dim`` at the positions in the tensor ``index``."""

    base: fx.Node
    x: fx.Node
    dim: int
    index: fx.Node


@dataclass(frozen=True)
class Fill:
    """A new tensor with one value everywhere. ``value``: None for uninitialized memory."""

    value: object


OfOne: TypeAlias = "Copy | Dropout | Rearrange | Slice | Select"
Reading: TypeAlias = "OfOne | Join | Stack | Assign | Write | WriteOne | WriteRows | Fill"
