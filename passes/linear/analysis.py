"""The analysis of linear maps: which tensors are a fixed linear image of some source tensor's rows.

The analysis visits each operator once, by the transfer rules of this room. An operator without a rule, or used in a way
that is not linear along features and blind along tokens, ends the walk: its node is its own source, and a
:class:`~mla_compile.passes.ir.stop.Stop` says why. Nothing here reads a name.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Container, Iterable

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.axes import Axes, fresh_axes
from mla_compile.passes.ir.expr import Expr
from mla_compile.passes.ir.graph import is_tensor, packet, shape, val
from mla_compile.passes.ir.stand_in import BARRED
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.nearby import Nearby
from mla_compile.passes.linear.records import LinearMap, Piece, RowsJoined, VirtualSources
from mla_compile.passes.linear.rows import gated_rows, one_of_all, some_rows
from mla_compile.passes.linear.rules import Rule, rule_of
from mla_compile.passes.linear.stops import barred, unexplained

_NONE = VirtualSources()


class LinearMaps:
    """The analysis over one graph. Results are kept per node; the graph is only read.

    ``sources`` are nodes that were chosen as sources: the walk ends there although it could go on. A weight that
    differs along an axis of the source's rows ends the walk too (otherwise a table of rotations would pass for one),
    unless ``per_row``: with the attention's output as the source, W_v does differ along the heads. ``virtual``: rows
    that are not nodes of the graph.
    """

    def __init__(
        self,
        weights: Collection[fx.Node],
        fake_mode: FakeTensorMode | None,
        sources: Iterable[fx.Node] = (),
        virtual: VirtualSources = _NONE,
        nearby: Nearby | None = None,
        *,
        per_row: bool = False,
    ) -> None:
        self.weights = weights
        self.fake_mode = fake_mode
        self.sources = frozenset(sources)
        self.per_row = per_row
        self.virtual = virtual
        # One for all analyses of the graph: it asks for no sources.
        self._nearby = nearby or Nearby()
        self.reasons: dict[fx.Node, Stop] = {}
        self._maps: dict[fx.Node, LinearMap] = {}
        self._identity: dict[fx.Node, Axes] = {}
        self._whole: LinearMaps | None = None
        self._unbound: LinearMaps | None = None

    def with_sources(self, sources: Iterable[fx.Node], *, per_row: bool = False) -> LinearMaps:
        """A fresh analysis of the same graph with other sources; atoms of one analysis never meet another's."""
        return LinearMaps(self.weights, self.fake_mode, sources, self.virtual, self._nearby, per_row=per_row)

    def with_virtual(self, virtual: VirtualSources) -> LinearMaps:
        return LinearMaps(self.weights, self.fake_mode, self.sources, virtual, self._nearby, per_row=self.per_row)

    @property
    def whole(self) -> LinearMaps:
        """The analysis whose sources are the rows that slices are taken from: one for all slices."""
        if self._whole is None:
            rows = {s.rows for several in self.virtual.slices.values() for s in several}
            rows |= {g.rows for several in self.virtual.gates.values() for g in several}
            self._whole = self.with_sources(rows, per_row=self.per_row)
            # Its own, too, or it would make another one at the first slice it meets.
            self._whole._whole = self._whole
        return self._whole

    @property
    def unbound(self) -> LinearMaps:
        """The analysis without chosen sources: one for all who ask, as long as it has not chosen any itself."""
        if self._unbound is None or self._unbound.sources:
            self._unbound = self.with_sources(())
        return self._unbound

    def is_weight(self, node: object) -> bool:
        """Whether ``node`` is computed from weights and constants only."""
        return isinstance(node, fx.Node) and node in self.weights

    def leaf(self, node: fx.Node) -> Expr:
        return Expr.leaf(node, self.fake_mode)

    def same_rows(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether one of two tensors is computed from the other, or both are projected from the same rows."""
        return self._nearby.same_rows(one, other)

    def behind(self, nodes: Iterable[fx.Node]) -> Container[fx.Node]:
        """``nodes``, and all that their numbers depend on, but for the keys and values of attentions before them."""
        return self._nearby.behind(nodes)

    def map(self, node: fx.Node) -> LinearMap:
        """The linear map of ``node``; at worst the identity over the node itself."""
        if node in self._maps:
            return self._maps[node]
        pending = [node]  # an explicit stack: chains are as deep as the model
        while pending:
            current = pending[-1]
            if current in self._maps:
                pending.pop()
                continue
            rule = self._rule(current)
            # A slice of rows is answered by the analysis of whole rows, and so is their product with a factor for each,
            # so its operand needs no map here.
            ends = rule is None or (rule in (some_rows, gated_rows) and self is not self.whole)
            needed = [] if ends else [n for n in self.operands(current) if n not in self._maps]
            if needed:
                pending.extend(needed)
                continue
            pending.pop()
            try:
                self._maps[current] = self._apply(current, rule)
            except RowsJoined as joined:  # maps that were handed out before stay true
                # Maps that were made through that node have to be made again. Which they are is not recorded: all are.
                self.sources |= {joined.node}
                self._maps.clear()
                pending = [node]
        return self._maps[node]

    def _rule(self, node: fx.Node) -> Rule | None:
        if node in self.sources or self.is_weight(node):
            return None
        rule = barred if BARRED in node.meta else rule_of(node)
        if rule is None or rule is barred:
            return rule
        return some_rows if node in self.virtual.slices else gated_rows if node in self.virtual.gates else rule

    def follows(self, node: fx.Node) -> bool:
        """Whether the operator of ``node`` has a rule, whatever that says of it."""
        return rule_of(node) is not None

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors whose maps make that of ``node``."""
        inputs = node.all_input_nodes
        if packet(node) is operator.getitem:  # one of several results, mapped by what their operator reads
            # A tuple has no map of its own.
            inputs = [n for whole in inputs for n in whole.all_input_nodes]
        return [n for n in inputs if is_tensor(n) and not self.is_weight(n)]

    def _apply(self, node: fx.Node, rule: Rule | None) -> LinearMap:
        result = (rule or unexplained)(self, node)
        # Sources and weights end the walk by choice: a reason would blame them in a report.
        if isinstance(result, Stop) and node not in self.sources and not self.is_weight(node):
            self.reasons[node] = result
        # Asked after the rule, which may find by itself that the axis is broadcast.
        if node in self.virtual.shared:
            return one_of_all(self, node, result)
        return self.identity(node) if isinstance(result, Stop) else result

    def axes_of(self, node: fx.Node) -> Axes:
        """The axes of ``node`` as rows of its own, one atom each."""
        # The same atoms each time: two maps from one source have to agree on what its tokens are.
        if node not in self._identity:
            self._identity[node] = fresh_axes(shape(node))
        return self._identity[node]

    def identity(self, node: fx.Node) -> LinearMap:
        axes = self.axes_of(node)
        piece = Piece(axes, val(node).dtype, node, axes)
        return LinearMap.single(piece.visited(node))
