"""Finds which tensors are fixed linear maps of the rows of a source.

The analysis visits each operator once and applies the transfer rules of this package. The walk ends at an operator that
has no rule, is not linear along the features, or depends on the token. The node of this operator becomes a source, and
a :class:`~mla_compile.passes.ir.stop.Stop` says why. No rule looks at the name of a module or a weight.
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
    """The analysis of one graph. It caches its results per node and does not change the graph.

    ``sources``: chosen nodes, at which the walk ends even if a rule could continue. ``per_row``: whether weights may
    differ along an axis of the source's rows. If False, a weight that differs ends the walk, because it may be a table
    of rotations. Use True if the source is the attention's output, because W_v differs along the heads. ``virtual``:
    sources that are not nodes of the graph.
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
        # All analyses of the graph share one `Nearby`, which does not depend on sources.
        self._nearby = nearby or Nearby()
        self.reasons: dict[fx.Node, Stop] = {}
        self._maps: dict[fx.Node, LinearMap] = {}
        self._identity: dict[fx.Node, Axes] = {}
        self._whole: LinearMaps | None = None
        self._unbound: LinearMaps | None = None

    def with_sources(self, sources: Iterable[fx.Node], *, per_row: bool = False) -> LinearMaps:
        """Return a fresh analysis of the same graph with other sources. It shares no atoms with this analysis."""
        return LinearMaps(self.weights, self.fake_mode, sources, self.virtual, self._nearby, per_row=per_row)

    def with_virtual(self, virtual: VirtualSources) -> LinearMaps:
        return LinearMaps(self.weights, self.fake_mode, self.sources, virtual, self._nearby, per_row=self.per_row)

    @property
    def whole(self) -> LinearMaps:
        """The analysis that all slices and gates share. Its sources are the rows that are sliced or gated."""
        if self._whole is None:
            rows = {s.rows for several in self.virtual.slices.values() for s in several}
            rows |= {g.rows for several in self.virtual.gates.values() for g in several}
            self._whole = self.with_sources(rows, per_row=self.per_row)
            # Without this line, the new analysis would create yet another analysis at its first slice.
            self._whole._whole = self._whole
        return self._whole

    @property
    def unbound(self) -> LinearMaps:
        """The analysis without chosen sources.

        If this analysis adds a source itself (:class:`RowsJoined`), the next access returns a new analysis.
        """
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
        """Return ``nodes`` and their ancestors. The search skips keys and values of earlier attentions."""
        return self._nearby.behind(nodes)

    def map(self, node: fx.Node) -> LinearMap:
        """Return the linear map of ``node``. If the walk ends at ``node``, the map is the identity of ``node``."""
        if node in self._maps:
            return self._maps[node]
        pending = [node]  # an explicit stack, because chains are as deep as the model
        while pending:
            current = pending[-1]
            if current in self._maps:
                pending.pop()
                continue
            rule = self._rule(current)
            # `some_rows` and `gated_rows` read the operand's map from `self.whole`, so the map is not computed here.
            ends = rule is None or (rule in (some_rows, gated_rows) and self is not self.whole)
            needed = [] if ends else [n for n in self.operands(current) if n not in self._maps]
            if needed:
                pending.extend(needed)
                continue
            pending.pop()
            try:
                self._maps[current] = self._apply(current, rule)
            except RowsJoined as joined:
                # From now on, maps must end at this node. The cache does not record which maps pass through the node,
                # so all maps are dropped. Callers may keep old maps, which stay true.
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
        """Whether there is a rule for the operator of ``node``, even if the rule refuses ``node``."""
        return rule_of(node) is not None

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors whose maps the rule for ``node`` needs."""
        inputs = node.all_input_nodes
        if packet(node) is operator.getitem:  # a tuple has no map, so the operands of its operator are needed
            inputs = [n for whole in inputs for n in whole.all_input_nodes]
        return [n for n in inputs if is_tensor(n) and not self.is_weight(n)]

    def _apply(self, node: fx.Node, rule: Rule | None) -> LinearMap:
        result = (rule or unexplained)(self, node)
        # Sources and weights end the walk by choice, so a report must not blame them.
        if isinstance(result, Stop) and node not in self.sources and not self.is_weight(node):
            self.reasons[node] = result
        # The rule is applied first, because the rule's map may already be constant along the shared axis.
        if node in self.virtual.shared:
            return one_of_all(self, node, result)
        return self.identity(node) if isinstance(result, Stop) else result

    def axes_of(self, node: fx.Node) -> Axes:
        """Return the axes of ``node`` as a source, with one atom each (none if the size is 1)."""
        # The atoms are cached, because two maps from one source must have the same tokens.
        if node not in self._identity:
            self._identity[node] = fresh_axes(shape(node))
        return self._identity[node]

    def identity(self, node: fx.Node) -> LinearMap:
        axes = self.axes_of(node)
        piece = Piece(axes, val(node).dtype, node, axes)
        return LinearMap.single(piece.visited(node))
