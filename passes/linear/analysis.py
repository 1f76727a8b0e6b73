"""Which tensors are a fixed linear image of some source tensor's rows, and by which weights.

For a tensor X of the graph this finds

    X[tokens..., features...] = scale * sum_e W[features..., e] z[tokens..., e] + b[features...]

with ``z`` a node (the source) and ``W``, ``b`` expressions of weights only. Every axis of X, z, W and b is a product of
:class:`~mla_compile.passes.ir.axes.Atom`; an atom of X is a *token* of z when it is also in z's axes, a *feature* when
it is in W's or b's, and *broadcast* when it is in neither. So the map is one einsum over atoms, and ``W = None`` means
the identity. X may also be a row of segments along one axis, each with a source of its own (keys = [latent part |
rotary part]).

The analysis walks each operator once, by the rules of :mod:`mla_compile.passes.linear.rules`. An operator without a
rule, or used in a way that is not linear along features and blind along tokens, ends the walk: its node is its own
source, and the :class:`Stop` says why. Nothing here reads a name, and nothing is decided by comparing sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.axes import Atom, Axes, Axis, Split, flatten, fresh_axes, substitute
from mla_compile.passes.ir.expr import Expr
from mla_compile.passes.ir.graph import is_tensor, packet, shape, val
from mla_compile.passes.linear.stops import Stop, unexplained

aten = torch.ops.aten


@dataclass(frozen=True)
class Factor:
    """A tensor of weights and the atom that each of its dimensions stands for."""

    expr: Expr
    atoms: Axis


@dataclass(frozen=True)
class Visit:
    """A node on the way from the source to X, and how many weight operations lie between the source and it."""

    node: fx.Node
    contractions: int
    scalings: int


@dataclass(frozen=True)
class Piece:
    """One linear map. ``source`` None: the piece is constant (zeros, or the bias alone).

    ``before``: the way from the whole rows to the whole of X, where ``source`` and X are slices of both.
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

    @property
    def source_atoms(self) -> frozenset[Atom]:
        return frozenset(flatten(self.source_axes))

    @property
    def projected(self) -> bool:
        """Whether a weight that sums over features lies between the source and X."""
        return bool(self.path) and self.path[-1].contractions > 0

    @property
    def contracted(self) -> tuple[Atom, ...]:
        """The atoms of the source that the weight sums over, in the source's order."""
        kept = set(flatten(self.axes))
        return tuple(a for a in flatten(self.source_axes) if a not in kept)

    def split(self, split: Split) -> Piece:
        """The same map with some atoms written as products of smaller ones."""
        if not split:
            return self

        def factor(f: Factor | None) -> Factor | None:
            if f is None or not any(a in split for a in f.atoms):
                return f
            atoms = substitute(f.atoms, split)
            return Factor(f.expr.view([_int(a) for a in atoms]), atoms)

        return replace(
            self,
            axes=tuple(substitute(a, split) for a in self.axes),
            source_axes=tuple(substitute(a, split) for a in self.source_axes),
            weight=factor(self.weight),
            bias=factor(self.bias),
        )

    def visited(self, node: fx.Node, contractions: int = 0, scalings: int = 0) -> Piece:
        last = self.path[-1] if self.path else Visit(node, 0, 0)
        visit = Visit(node, last.contractions + contractions, last.scalings + scalings)
        return replace(self, path=(*self.path, visit))


@dataclass(frozen=True)
class Segment:
    """Columns ``start`` to ``stop`` of the segmented axis, and the map that makes them."""

    start: int
    stop: int
    piece: Piece


@dataclass(frozen=True)
class LinearMap:
    """The segments of one tensor along ``axis``; a single segment when the tensor is one linear map."""

    segments: tuple[Segment, ...]
    axis: int | None = None

    @staticmethod
    def single(piece: Piece) -> LinearMap:
        return LinearMap((Segment(0, 0, piece),))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(s.piece for s in self.segments)

    def each(self, fn: Callable[[Piece], Piece | Stop], axis: int | None = None) -> LinearMap | Stop:
        """``fn`` applied to every piece; ``axis`` is where the segmented axis is afterwards (unchanged by default)."""
        done: list[Segment] = []
        for segment in self.segments:
            piece = fn(segment.piece)
            if isinstance(piece, Stop):
                return piece
            done.append(replace(segment, piece=piece))
        return LinearMap(tuple(done), self.axis if axis is None else axis)


@dataclass(frozen=True)
class Shown:
    """``node`` shows some positions of axis ``dim`` of ``rows``."""

    rows: fx.Node
    dim: int
    node: fx.Node


class RowsJoined(Exception):  # noqa: N818  # a change of course, not an error
    """What was joined at ``node`` and taken for columns turns out to be rows: there the walk has to end."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class LinearMaps:
    """The analysis over one graph. Results are kept per node; the graph is only read.

    ``stops`` are nodes at which the walk ends although it could go on (a chosen source). A weight that differs along an
    axis of the source's rows ends the walk (a table of rotations would else pass for a weight), unless ``per_row``:
    with the attention's output as the source, W_v does differ along the heads. ``shown``: slices of a linear image of
    rows, and what shows the same positions of those rows.
    """

    def __init__(
        self,
        weights: Collection[fx.Node],
        fake_mode: FakeTensorMode | None,
        stops: Iterable[fx.Node] = (),
        per_row: bool = False,
        shown: Mapping[fx.Node, Sequence[Shown]] | None = None,
    ) -> None:
        self.weights = weights
        self.fake_mode = fake_mode
        self.stops = frozenset(stops)
        self.per_row = per_row
        self.shown = shown or {}
        self.reasons: dict[fx.Node, Stop] = {}
        self._maps: dict[fx.Node, LinearMap] = {}
        self._identity: dict[fx.Node, Axes] = {}
        self._whole: LinearMaps | None = None

    def with_stops(self, stops: Iterable[fx.Node], per_row: bool = False) -> LinearMaps:
        """A fresh analysis of the same graph with other sources; atoms of one analysis never meet another's."""
        return LinearMaps(self.weights, self.fake_mode, stops, per_row, self.shown)

    def with_shown(self, shown: Mapping[fx.Node, Sequence[Shown]]) -> LinearMaps:
        return LinearMaps(self.weights, self.fake_mode, self.stops, self.per_row, shown)

    @property
    def whole(self) -> LinearMaps:
        """The analysis that ends at the rows of which parts are shown: the same for all slices, whatever ends here."""
        if self._whole is None:
            rows = {s.rows for several in self.shown.values() for s in several}
            self._whole = self.with_stops(rows, self.per_row)
            self._whole._whole = self._whole
        return self._whole

    def is_weight(self, node: object) -> bool:
        """Whether ``node`` is computed from weights and constants only."""
        return isinstance(node, fx.Node) and node in self.weights

    def leaf(self, node: fx.Node) -> Expr:
        return Expr.leaf(node, self.fake_mode)

    def map(self, node: fx.Node) -> LinearMap:
        """The linear map of ``node``; at worst the identity over the node itself."""
        # The rules build on the records above.
        from mla_compile.passes.linear.rows import some_rows
        from mla_compile.passes.linear.rules import RULES

        if node in self._maps:
            return self._maps[node]
        pending = [node]  # an explicit stack: chains are as deep as the model
        while pending:
            current = pending[-1]
            if current in self._maps:
                pending.pop()
                continue
            rule = None if current in self.stops or self.is_weight(current) else RULES.get(packet(current))
            if rule is not None and current in self.shown:
                rule = some_rows
            ends = rule is None or (rule is some_rows and self is not self.whole)
            needed = [] if ends else [n for n in self.operands(current) if n not in self._maps]
            if needed:
                pending.extend(needed)
                continue
            pending.pop()
            try:
                self._maps[current] = self._apply(current, rule)
            except RowsJoined as joined:  # channels first, tokens last; maps found so far hold by themselves
                self.stops |= {joined.node}
                self._maps.clear()
                pending = [node]
        return self._maps[node]

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors whose maps make that of ``node``."""
        inputs = [n for n in node.all_input_nodes if not self.is_weight(n)]
        if packet(node) is operator.getitem:  # a part of a split: the map is that of the tensor that was split
            return [n for part in inputs for n in part.all_input_nodes if is_tensor(n) and not self.is_weight(n)]
        return [n for n in inputs if is_tensor(n)]

    def _apply(self, node: fx.Node, rule: Callable[[LinearMaps, fx.Node], LinearMap | Stop] | None) -> LinearMap:
        if rule is None:
            if node not in self.stops and not self.is_weight(node):
                self.reasons[node] = unexplained(node)
            return self.identity(node)
        result = rule(self, node)
        if isinstance(result, Stop):
            self.reasons[node] = result
            return self.identity(node)
        return result

    def axes_of(self, node: fx.Node) -> Axes:
        """The axes of ``node`` as rows of its own, one atom each."""
        if node not in self._identity:
            self._identity[node] = fresh_axes(shape(node))
        return self._identity[node]

    def identity(self, node: fx.Node) -> LinearMap:
        axes = self.axes_of(node)
        piece = Piece(axes, val(node).dtype, node, axes)
        return LinearMap.single(piece.visited(node))


def _int(atom: Atom) -> int:
    assert isinstance(atom.size, int), "weights have fixed sizes"
    return atom.size
