"""Linear maps as data: the rows from which a tensor is computed, the weights, and the operators in between.

A tensor X is described by

    X[tokens..., features...] = scale * sum_e W[features..., e] z[tokens..., e] + b[features...]

where ``z`` is a node (the source), and ``W`` and ``b`` are expressions of weights only. Every axis of X, z, W and b is
a product of :class:`~mla_compile.passes.ir.axes.Atom`. An atom of X is a *token* if z has it, a *feature* if W or b has
it, and *broadcast* otherwise. The map is therefore one einsum over atoms. ``W = None`` means the identity.

X may also consist of segments along one axis, each with its own source (keys = [latent part | rotary part]). Each
segment may be a sum of maps of several sources (keys = W c + a row that all heads share).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.axes import Atom, Axes, Axis, Split, flatten, fresh_axis, substitute
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.sizes import Size
from mla_compile.passes.ir.stop import Stop


@dataclass(frozen=True)
class Visit:
    """A node on the path from the source to X.

    ``contractions`` and ``scalings`` count the operators with weights up to this node. A contraction sums over
    features. A scaling only multiplies, divides or adds.
    """

    node: fx.Node
    contractions: int
    scalings: int


@dataclass(frozen=True)
class Piece:
    """One linear map. If ``source`` is None, the piece is constant (zeros, or only a bias).

    ``before``: for a virtual slice or gate of rows (:class:`VirtualSources`), the path from the original rows to the
    tensor that the model slices or multiplies. ``added``: if X is a sum, the other summands, which have no bias. All
    summands have axes of equal sizes. ``defined``: False for uninitialized memory.
    """

    axes: Axes
    dtype: torch.dtype
    source: fx.Node | None = None
    source_axes: Axes = ()
    weight: Factor | None = None
    bias: Factor | None = None
    scale: float = 1.0
    path: tuple[Visit, ...] = ()
    before: tuple[Visit, ...] = ()
    defined: bool = True
    added: tuple[Piece, ...] = ()

    @property
    def summands(self) -> tuple[Piece, ...]:
        """The maps whose sum is X."""
        return (replace(self, added=()), *self.added) if self.added else (self,)

    def each(self, fn: Callable[[Piece], Piece | Stop]) -> Piece | Stop:
        """Apply ``fn`` to every summand. ``fn`` handles an operator that is linear up to a constant."""
        if not self.added:
            return fn(self)
        first, *others = (fn(p) for p in self.summands)
        if isinstance(first, Stop):
            return first
        # The operator's constant must be added only once. Maps in `added` have no bias, so a bias that `fn` adds is
        # this constant.
        added: list[Piece] = []
        for one in others:
            if isinstance(one, Stop):
                return one
            added.append(replace(one, bias=None))
        return replace(first, added=tuple(added))

    @property
    def source_atoms(self) -> frozenset[Atom]:
        return frozenset(flatten(self.source_axes))

    @property
    def projected(self) -> bool:
        """Whether there is a projection between the source and X.

        A projection is a product with a weight that is summed over features.
        """
        return bool(self.path) and self.path[-1].contractions > 0

    @property
    def contracted(self) -> tuple[Atom, ...]:
        """The source's atoms over which the weight sums, in the source's order."""
        kept = set(flatten(self.axes))
        return tuple(a for a in flatten(self.source_axes) if a not in kept)

    def split(self, split: Split) -> Piece:
        """Return the same map with some atoms written as products of smaller atoms."""
        if not split:
            return self

        return replace(
            self,
            axes=tuple(substitute(a, split) for a in self.axes),
            source_axes=tuple(substitute(a, split) for a in self.source_axes),
            weight=self.weight and self.weight.split(split),
            bias=self.bias and self.bias.split(split),
            added=tuple(p.split(split) for p in self.added),
        )

    def visited(self, node: fx.Node, contractions: int = 0, scalings: int = 0) -> Piece:
        # Counts accumulate along the path, so the last visit tells whether anything was projected at all.
        last = self.path[-1] if self.path else Visit(node, 0, 0)
        visit = Visit(node, last.contractions + contractions, last.scalings + scalings)
        return replace(
            self, path=(*self.path, visit), added=tuple(p.visited(node, contractions, scalings) for p in self.added)
        )


@dataclass(frozen=True)
class Segment:
    """Columns ``start`` to ``stop`` of the segmented axis, and their map."""

    start: int
    stop: int
    piece: Piece

    def moved(self, by: int) -> Segment:
        return replace(self, start=self.start + by, stop=self.stop + by)


@dataclass(frozen=True)
class LinearMap:
    """A tensor as segments along ``axis``, or as a single segment if the whole tensor is one linear map."""

    segments: tuple[Segment, ...]
    axis: int | None = None

    @staticmethod
    def single(piece: Piece) -> LinearMap:
        return LinearMap((Segment(0, 0, piece),))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All summands of all segments. Each has one source."""
        return tuple(p for s in self.segments for p in s.piece.summands)

    def each(self, fn: Callable[[Piece], Piece | Stop], axis: int | None = None) -> LinearMap | Stop:
        """Apply ``fn`` to every piece; ``axis`` is the new position of the segmented axis (unchanged by default)."""
        return self.each_segment(lambda segment: fn(segment.piece), axis)

    def each_segment(self, fn: Callable[[Segment], Piece | Stop], axis: int | None = None) -> LinearMap | Stop:
        """Apply ``fn`` to every piece, like :meth:`each`. ``fn`` receives a segment, which has the bounds."""
        done: list[Segment] = []
        for segment in self.segments:
            piece = segment.piece.each(partial(_of_segment, fn, segment.start, segment.stop))
            if isinstance(piece, Stop):
                return piece
            done.append(replace(segment, piece=piece))
        return LinearMap(tuple(done), self.axis if axis is None else axis)


@dataclass(frozen=True)
class RowSlice:
    """The virtual source ``node``: some positions of axis ``dim`` of ``rows``, or all positions padded with zeros."""

    rows: fx.Node
    dim: int
    node: fx.Node


@dataclass(frozen=True)
class RowGate:
    """The virtual source ``node``: ``rows``, with each row multiplied or divided by its own number."""

    rows: fx.Node
    node: fx.Node


@dataclass(frozen=True)
class SharedRows:
    """A tensor that is constant along its axis ``dim``.

    ``one``: a virtual source, which is the tensor at the first position of this axis.
    """

    dim: int
    one: fx.Node


@dataclass(frozen=True)
class VirtualSources:
    """Sources that an analysis may use in addition to the nodes of the graph.

    ``slices``: for a node that slices a linear map of rows, the rows sliced in the same way. ``gates``: for a node that
    multiplies a linear map of rows by one number per row, the multiplied rows. ``shared``: for a tensor that is
    constant along an axis, its first position. ``grouped``: products whose weight differs along a group axis of the
    rows, such as groups of heads with separate latents.
    """

    slices: Mapping[fx.Node, Sequence[RowSlice]] = field(default_factory=dict)
    gates: Mapping[fx.Node, Sequence[RowGate]] = field(default_factory=dict)
    shared: Mapping[fx.Node, SharedRows] = field(default_factory=dict)
    grouped: frozenset[fx.Node] = frozenset()


class RowsJoined(Exception):  # noqa: N818  # a change of course, not an error
    """The parts joined at ``node`` form one source together, so the walk has to end at ``node``."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class Maps(Protocol):
    """The interface of :class:`~mla_compile.passes.linear.analysis.LinearMaps` for its rules and readers.

    The analysis calls the rules, and the rules call the analysis for the maps of their operands.
    """

    weights: Collection[fx.Node]
    fake_mode: FakeTensorMode | None
    sources: frozenset[fx.Node]
    per_row: bool
    virtual: VirtualSources
    reasons: dict[fx.Node, Stop]

    @property
    def whole(self) -> Maps: ...
    @property
    def unbound(self) -> Maps: ...
    def with_sources(self, sources: Iterable[fx.Node], *, per_row: bool = False) -> Maps: ...
    def with_virtual(self, virtual: VirtualSources) -> Maps: ...
    def is_weight(self, node: object) -> bool: ...
    def leaf(self, node: fx.Node) -> Expr: ...
    def map(self, node: fx.Node) -> LinearMap: ...
    def operands(self, node: fx.Node) -> list[fx.Node]: ...
    def follows(self, node: fx.Node) -> bool: ...
    def axes_of(self, node: fx.Node) -> Axes: ...
    def same_rows(self, one: fx.Node, other: fx.Node) -> bool: ...
    def behind(self, nodes: Iterable[fx.Node]) -> Container[fx.Node]: ...


@dataclass(frozen=True)
class Term:
    """One linear piece of K or V, in the site's atoms.

    ``at`` maps each site atom to the piece's atom. Along site atoms that are not in ``at``, the piece broadcasts.
    ``features`` are the piece's own atoms along columns ``start`` to ``stop`` of the feature axis. The terms of a sum
    have the same columns. ``product`` is the index of the query-key product to which the term belongs (None for a value
    term).
    """

    piece: Piece
    at: dict[Atom, Atom]
    features: Axis
    start: int
    stop: int
    product: int | None = None

    def kind(self, atom: Atom) -> str:
        """Return the role of a site atom in this piece: ``token``, ``feature`` or ``broadcast``."""
        own = self.at.get(atom)
        if own is None:
            return "broadcast"
        if own in self.piece.source_atoms:
            return "token"
        factors = [f for f in (self.piece.weight, self.piece.bias) if f is not None]
        # Along all other atoms, the piece has the same values at all positions.
        return "feature" if any(own in f.atoms for f in factors) else "broadcast"


def _of_segment(fn: Callable[[Segment], Piece | Stop], start: int, stop: int, piece: Piece) -> Piece | Stop:
    return fn(Segment(start, stop, piece))


def finish(result: LinearMap | Stop, node: fx.Node) -> LinearMap | Stop:
    """Append ``node`` to the path of every piece, and set the dtype of the pieces to the dtype of ``node``."""
    if isinstance(result, Stop):
        return result
    dtype = val(node).dtype
    return result.each(lambda p: replace(p, dtype=dtype).visited(node))


def quantizes(dtype: torch.dtype) -> bool:
    """Whether a conversion to ``dtype`` does more than round: ``dtype`` is an integer, complex or 8-bit dtype."""
    return not dtype.is_floating_point or dtype.itemsize < 2


def broadcast_to(source: LinearMap, new: Sequence[Size]) -> LinearMap | Stop:
    """Broadcast ``source`` to shape ``new``. Axes that grow from size 1 get broadcast atoms."""
    extra = len(new) - len(source.pieces[0].axes)
    at = None if source.axis is None else source.axis + extra

    def grow(piece: Piece) -> Piece:
        axes: list[Axis] = [fresh_axis(s) for s in new[:extra]]
        for k, own in enumerate(piece.axes, start=extra):
            # An empty axis has size 1 and grows. Along the segmented axis, each piece keeps its own width.
            axes.append(own if own or k == at else fresh_axis(new[k]))
        return replace(piece, axes=tuple(axes))

    return source.each(grow, at)
