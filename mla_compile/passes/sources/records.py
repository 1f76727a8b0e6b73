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
    """The rows of one source: ``node``, read as [batch, keys, width].

    ``axes`` has one axis for each dimension of ``node``. Batch and keys are written in the site's atoms, and the width
    in the source's own atoms. ``heads``: the heads that have rows of their own; it is empty except in a plan for a part
    of an attention. ``parts``: if the rows of several sources are joined, the rows of each source. ``node`` is then the
    first source.
    """

    node: fx.Node
    axes: tuple[Axis, ...]
    width: Axis
    heads: Axis = ()
    parts: tuple[Rows, ...] = ()

    @property
    def each(self) -> tuple[Rows, ...]:
        """The rows of each source that is joined here, or these rows alone if there is one source."""
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
    heads share without a projection. ``values``: the rows of the values, if these are not made from the latent. If K
    or V is a sum, each of these three may be the joined rows of several sources.

    ``visible``: the keys that the masks show, in the form that the attention operator takes.

    In a plan for a part of the site, ``keys`` or ``vals`` is empty if that side is not rewritten, and ``extra`` holds
    all rows that are none of the three above. ``fits_op``: whether the attention operator can be used even so. If it
    can, ``extra`` holds only rows of keys, and their scores are added to the mask.
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
        # Indexed by node, because rows that are joined to others may also be read separately.
        return tuple({one.node: one for rows in named for one in rows.each}.values())

    @property
    def row_values(self) -> int:
        """The number of values per token in all rows; per-head and per-group rows count once for each head or group."""
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
        """The operands other than queries, masks and weights: the rows, and K or V if that side is not rewritten."""
        kept = [] if self.keys else [p.k.node for p in self.site.products]
        kept += [] if self.vals else [self.site.v.node]
        return (*(r.node for r in self.rows), *kept)

    def sizes(self) -> tuple[Size, Size, Size]:
        """Return B, S, T."""
        return axis_size(self.batch), axis_size(self.site.queries), axis_size(self.site.keys)


@dataclass(frozen=True)
class Fusion:
    """How an attention over rows that all heads share becomes one operator, or one operator per memory.

    If keys and values are columns of the same rows, ``whole`` is the tensor of those rows, and ``columns`` is the range
    of columns of ``plan.latent`` that are the values. The range lies at the start or the end. ``memories``: if the rows
    are joined from several tensors (such as a window and older rows), a plan for each tensor.
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

    ``by_call``: the number of queries is symbolic, so the graph keeps both the expanded and the absorbed form, and each
    call picks one of them.

    For a site that is absorbed in part, ``parts`` is what is absorbed, ``kept`` is what is not absorbed and why, and
    ``instead`` is the verdict that applies if the partial absorption is given up. ``narrowed`` pairs nodes with their
    sources. Each of these nodes gets its own product, because the rest of its projection is no longer read. ``fusion``:
    the fusion of a site over shared rows. ``fix``: advice for the user that replaces the advice of ``code``. ``held``:
    whether the cache held K and V of each head before the rewrite. ``beside``: whether it still holds them in addition
    to rows.
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
    """Return the atoms of ``lead`` that are groups of heads, along which both rows and weights differ."""
    made = {(t.at[a], a): t for t in terms for a in lead if t.kind(a) == "token" and t.piece.weight is not None}
    return tuple(dict.fromkeys(a for (own, a), t in made.items() if t.piece.weight and own in t.piece.weight.atoms))


def selected(site: AttentionSite, product: Product) -> Axis:
    """Return the atoms of ``product``'s scores along which positions are selected later, after the softmax."""
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
    # Tensors that are joined along the axis may each be constant and still differ from each other.
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
