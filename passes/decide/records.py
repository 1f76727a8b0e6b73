"""What is decided about an attention, as data: the plan of its rewrite, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.cost import AbsorbedColumns, Choice
from mla_compile.passes.ir.axes import Axis, axis_size
from mla_compile.passes.ir.sizes import Size
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Piece, Term

Side = Literal["keys", "values"]


@dataclass(frozen=True)
class Rows:
    """The rows of one source: ``node`` as [batch, keys, width]; ``axes`` are its axes in the site's and own atoms.

    ``heads``: the heads that have rows of their own, in a plan for a part of an attention.
    """

    node: fx.Node
    axes: tuple[Axis, ...]
    width: Axis
    heads: Axis = ()

    @property
    def size(self) -> int:
        size = axis_size(self.width)
        assert isinstance(size, int)
        return size


@dataclass(frozen=True)
class AbsorbPlan:
    """Everything a rewrite needs; it decides nothing any more.

    ``latent`` are the rows that a weight expands (and the values' rows where they are the same), ``rope`` the rows that
    all heads share as they are, ``values`` the values' rows where they are not the latent.

    Of a plan for a part, ``keys`` or ``vals`` are empty where that side stays as it is, ``extra`` are further rows, and
    ``fits_op`` tells whether the operator takes it (``extra`` then are keys, whose scores join the mask).
    """

    site: AttentionSite
    keys: tuple[Term, ...]
    vals: tuple[Term, ...]
    batch: Axis
    heads: Axis
    latent: Rows
    rope: Rows | None
    values: Rows | None
    dims: Dims
    extra: tuple[Rows, ...] = ()
    fits_op: bool = True
    part: bool = False

    @property
    def value_rows(self) -> Rows:
        return self.values or self.latent

    @property
    def rows(self) -> tuple[Rows, ...]:
        return tuple(r for r in (self.latent, self.rope, self.values, *self.extra) if r is not None)

    def rows_of(self, source: fx.Node) -> Rows:
        return next(r for r in self.rows if r.node is source)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """What the rewritten site reads besides queries, masks and weights."""
        kept = [] if self.keys else [p.k.node for p in self.site.products]
        kept += [] if self.vals else [self.site.v.node]
        return (*(r.node for r in self.rows), *kept)

    def sizes(self) -> tuple[Size, Size, Size]:
        """B, S, T."""
        return axis_size(self.batch), axis_size(self.site.queries), axis_size(self.site.keys)


@dataclass(frozen=True)
class LeftPart:
    """What of an absorbed attention stays as it was, and why."""

    what: str
    stop: Stop


@dataclass(frozen=True)
class Verdict:
    """The decision about one site. ``plan`` and ``choice`` are there whenever absorption is legal.

    ``by_call``: the number of queries is symbolic, so both forms are kept and every call picks. Of a site that is
    absorbed in part, ``parts`` are what is, ``kept`` what is not and why, ``instead`` the verdict without it, and
    ``narrowed`` the nodes that are to be made alone, each with its source, because the rest of their projection is not
    read any more.
    """

    site: AttentionSite
    code: Code
    reason: str
    blame: fx.Node | None = None
    plan: AbsorbPlan | None = None
    choice: Choice | None = None
    by_call: bool = False
    parts: tuple[AbsorbedColumns, ...] = ()
    kept: tuple[LeftPart, ...] = ()
    instead: Verdict | None = None
    narrowed: tuple[tuple[fx.Node, fx.Node], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def absorb(self) -> bool:
        return self.code is Code.ABSORBED


def pieces_of(maps: list[LinearMap]) -> list[Piece]:
    """Every piece that has a source."""
    return [p for m in maps for p in m.pieces if p.source is not None]
