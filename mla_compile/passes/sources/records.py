"""Records of the decision about an attention: the plan of its rewrite, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.core.records import KeptPart
from mla_compile.passes.attention.site import AttentionSite, Operand, Product, Visible
from mla_compile.passes.cost.cost import AbsorbedColumns, Choice
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, fixed_size, flatten
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, Term

Side = Literal["keys", "values"]


@dataclass(frozen=True)
class Rows:
    """The rows of one source, or the joined rows of several sources.

    ``node``: the source, read as [batch, keys, width]. For joined rows, this is the first source. ``axes``: one axis
    for each dimension of ``node``. Batch and keys consist of the site's atoms, and the width consists of the source's
    own atoms. ``heads``: the heads with separate rows. Only a plan for a part of an attention has such heads.
    ``parts``: the rows of each source, if the rows are joined.
    """

    node: fx.Node
    axes: tuple[Axis, ...]
    width: Axis
    heads: Axis = ()
    parts: tuple[Rows, ...] = ()

    @property
    def each(self) -> tuple[Rows, ...]:
        """The rows of each joined source; ``self`` alone if there is only one source."""
        return self.parts or (self,)

    @property
    def size(self) -> int:
        return fixed_size(self.width)

    @property
    def count(self) -> int:
        """The number of rows per token: one for each of ``heads``, or 1 if all heads share a row."""
        return fixed_size(self.heads)


@dataclass(frozen=True)
class AbsorbPlan:
    """Everything that a rewrite needs; the rewrite itself decides nothing.

    ``latent``: the rows that a weight expands. ``rope``: the other rows of the keys, usually a rotary key that all
    heads share. ``values``: the rows of the values; None if the latent makes the values. If K or V is a sum, these
    rows may be joined from several sources.

    ``visible``: the keys that the masks show, in the form that the attention operator takes.

    ``part``: whether the plan covers only a part of the site. ``keys`` or ``vals`` is then empty if that side is not
    rewritten, and ``extra`` holds all remaining rows. ``fits_op``: whether the attention operator can be used. If so,
    all ``extra`` rows are rows of keys, and the scores of ``extra`` rows are added to the mask.
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
    visible: Visible
    extra: tuple[Rows, ...] = ()
    fits_op: bool = True
    part: bool = False

    @property
    def sides(self) -> tuple[tuple[Side, tuple[Term, ...]], tuple[Side, tuple[Term, ...]]]:
        return ("keys", self.keys), ("values", self.vals)

    @property
    def whole(self) -> bool:
        """Whether the attention operator replaces the whole site; if not, each product is rewritten separately."""
        return self.site.open_core is None and self.fits_op

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.keys, *self.vals)

    @property
    def value_rows(self) -> Rows:
        return self.values or self.latent

    @property
    def rows(self) -> tuple[Rows, ...]:
        named = (r for r in (self.latent, self.rope, self.values, *self.extra) if r is not None)
        # The dict removes duplicates: rows may be joined to other rows and also be read separately.
        return tuple({one.node: one for rows in named for one in rows.each}.values())

    @property
    def row_values(self) -> int:
        """The number of values per token in all rows, including the separate rows of each head or group."""
        groups = groups_of(self.terms, self.batch)
        return sum(r.size * r.count * fixed_size(a for a in groups if a in flatten(r.axes)) for r in self.rows)

    @property
    def expanded_values(self) -> int:
        """The number of values per token in K and V of all heads."""
        return self.dims.G * self.dims.expanded_values

    @property
    def saves_cache(self) -> bool:
        """Whether the rows are narrower than the K and V that they replace; otherwise absorption saves nothing."""
        return self.row_values < self.expanded_values

    def expands(self, rows: Rows) -> bool:
        """Whether a weight makes columns of K or V from ``rows``; a shared rotary key is read without a weight."""
        return any(t.piece.source is rows.node and t.piece.projected for t in self.terms)

    def rows_of(self, source: fx.Node) -> Rows:
        return next(r for r in self.rows if r.node is source)

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The rows, and K or V if that side is not rewritten."""
        kept = [] if self.keys else [p.k.node for p in self.site.products]
        kept += [] if self.vals else [self.site.v.node]
        return (*(r.node for r in self.rows), *kept)

    def sizes(self) -> tuple[Size, Size, Size]:
        """Return B, S, T."""
        return axis_size(self.batch), axis_size(self.site.queries), axis_size(self.site.keys)


@dataclass(frozen=True)
class Fusion:
    """The plan to fuse an attention over shared rows into one operator, or into one operator per memory.

    ``whole``: the tensor of rows, if both keys and values are columns of the rows. ``columns``: the range of columns of
    ``plan.latent`` that holds the values, at the start or the end. ``memories``: a plan for each memory, if the rows
    are joined from several tensors (such as a window and older rows).
    """

    plan: AbsorbPlan
    columns: tuple[int, int] | None = None
    whole: fx.Node | None = None
    memories: tuple[AbsorbPlan, ...] = ()

    @property
    def each(self) -> tuple[AbsorbPlan, ...]:
        """The plan of each memory, or the only plan."""
        return self.memories or (self.plan,)

    @property
    def is_step(self) -> bool:
        """Whether each call has one query."""
        return same(axis_size(self.plan.site.queries), 1)


@dataclass(frozen=True)
class Verdict:
    """The decision about one site. ``plan`` and ``choice`` are set whenever absorption is legal.

    ``by_call``: whether the graph keeps the expanded and the absorbed form, and each call picks a form. This happens if
    the number of queries is symbolic.

    Three fields are set if only a part of the site is absorbed. ``parts``: the absorbed columns. ``kept``: the rest,
    with reasons. ``instead``: the verdict if the partial absorption is given up.

    ``narrowed``: nodes that get a separate product because the rest of the projection is no longer read, each with its
    sources. ``fusion``: how to fuse a site over shared rows. ``fix``: advice for the user, instead of the advice of
    ``code``. ``held``: whether the cache held K and V of each head before the rewrite. ``beside``: whether the cache
    still holds K and V, in addition to rows.
    """

    site: AttentionSite
    code: Code
    reason: str
    blame: fx.Node | None = None
    plan: AbsorbPlan | None = None
    choice: Choice | None = None
    by_call: bool = False
    parts: tuple[AbsorbedColumns, ...] = ()
    kept: tuple[KeptPart, ...] = ()
    instead: Verdict | None = None
    narrowed: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    fusion: Fusion | None = None
    fix: str | None = None
    held: bool = False
    beside: bool = False

    @property
    def absorb(self) -> bool:
        return self.code is Code.ABSORBED


def pieces_of(maps: list[LinearMap]) -> list[Piece]:
    """Return every piece of ``maps`` that has a source."""
    return [p for m in maps for p in m.pieces if p.source is not None]


def groups_of(terms: Iterable[Term], lead: Axis) -> Axis:
    """Return the atoms of ``lead`` along which both rows and weights differ. These atoms are groups of heads."""
    made = {(t.at[a], a): t for t in terms for a in lead if t.kind(a) == "token" and t.piece.weight is not None}
    return tuple(dict.fromkeys(a for (own, a), t in made.items() if t.piece.weight and own in t.piece.weight.atoms))


def selected(site: AttentionSite, product: Product) -> Axis:
    """Return the atoms of the scores of ``product`` along which the model selects positions after the softmax."""
    return tuple(a for a in flatten(product.out) if a not in (*site.lead, *site.queries, *site.keys))


def repeats(operand: Operand, atom: Atom, maps: Maps) -> bool:
    """Whether ``operand`` has the same values at every position of ``atom``."""
    at = next((k for k, axis in enumerate(operand.axes) if atom in axis), None)
    if at is None:
        return True
    return axis_is_broadcast(operand.node, at, maps)


def axis_is_broadcast(node: fx.Node, dim: int, maps: Maps) -> bool:
    """Whether ``node`` is constant along its axis ``dim``."""
    if maps.is_weight(node):
        return same(shape(node)[dim], 1)
    found = maps.map(node)
    # A join along the axis may vary even if each joined tensor is constant.
    return found.axis != dim and all(_is_broadcast(set(p.axes[dim]), p) for p in found.pieces)


def ends_of(operands: Iterable[Operand], lead: Axis, maps: Maps) -> list[fx.Node]:
    """Return the sources at which the walks back from ``operands`` ended.

    Sources that are constant along a lead axis are listed last, because rows that all heads share are no obstacle.
    """
    found = [(_shares(o, p, lead), p.source) for o in operands for p in maps.map(o.node).pieces if p.source is not None]
    return list(dict.fromkeys(source for _, source in sorted(found, key=lambda end: end[0])))


def _shares(operand: Operand, piece: Piece, lead: Axis) -> bool:
    axes = zip(operand.axes, piece.axes, strict=True)
    return any(own and not set(lead).isdisjoint(axis) and _is_broadcast(set(own), piece) for axis, own in axes)


def _is_broadcast(axis: set[Atom], piece: Piece) -> bool:
    made = {a for factor in (piece.weight, piece.bias) if factor is not None for a in factor.atoms}
    return axis.isdisjoint(made | piece.source_atoms)
