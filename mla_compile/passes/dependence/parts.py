"""Computes parts of a tensor along one axis from parts of its operands.

For example, ``K = cat([K_a, K_b], heads)`` may be followed by views, casts and a cat along the features. The heads of
``K_a`` in the result depend only on ``K_a``. :class:`AxisParts` finds where the parts meet, and :class:`PartMaker`
builds a part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.dependence.again import Repeater
from mla_compile.passes.dependence.steps import BackwardStep, Blind, Joined, step
from mla_compile.passes.ir.graph import Builder, shape
from mla_compile.passes.ir.moves import Assign, Stack
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.walk import REACH, reachable

aten = torch.ops.aten

Made = frozenset[object]


@dataclass(frozen=True)
class Interval:
    """Neighbouring positions of an axis that all depend on the same nodes (``made``)."""

    start: int
    stop: int
    made: Made


@dataclass
class AxisParts:
    """Finds what the positions along an axis of a tensor depend on.

    ``weights``: nodes computed from weights only. ``ends``: nodes at which the walk ends. ``made_of``: a function that
    returns what a node without a step depends on. If it returns different results, the positions belong to different
    parts.
    """

    weights: Collection[fx.Node]
    ends: Collection[fx.Node]
    made_of: Callable[[fx.Node], Made]

    def __post_init__(self) -> None:
        self._cut: set[fx.Node] = set()
        self._runs: dict[tuple[fx.Node, int], tuple[Interval, ...]] = {}

    def is_weight(self, node: fx.Node) -> bool:
        return node in self.weights or node in self._cut

    def cut(self, weight: fx.Node, part: fx.Node) -> None:
        """If ``weight`` is a weight, record that ``part``, a new node, is a weight too."""
        if self.is_weight(weight):
            self._cut.add(part)

    def step(self, node: fx.Node, dim: int) -> BackwardStep | None:
        return None if node in self.ends or self.is_weight(node) else step(node, dim)

    def stacked(self, node: fx.Node, dim: int) -> tuple[fx.Node, ...] | None:
        """Return the tensors stacked along axis ``dim`` of ``node``, one per position; None if nothing is stacked."""
        how = None if node in self.ends or self.is_weight(node) else decode(node)
        return how.parts if isinstance(how, Stack) and how.dim == dim else None

    def runs(self, node: fx.Node, dim: int, depth: int = 0) -> tuple[Interval, ...]:
        """Return the intervals of axis ``dim`` of ``node``, cut wherever the dependences change.

        The length of the axis must be known.
        """
        key = (node, dim)
        if key not in self._runs:
            self._runs[key] = _merged(self._found(node, dim, depth))
        return self._runs[key]

    def visited(self) -> list[tuple[fx.Node, int]]:
        """Return the nodes and axes of all runs found so far, in graph order."""
        return sorted(self._runs)

    def _found(self, node: fx.Node, dim: int, depth: int) -> list[Interval]:
        length = shape(node)[dim]
        assert isinstance(length, int)
        # The depth of the recursion is bounded. Everything farther upstream is treated as one dependence. The attention
        # may then stay whole.
        how = self.step(node, dim) if depth < REACH else None
        if how is None:
            stacked = self.stacked(node, dim)
            if stacked is not None:
                return [Interval(k, k + 1, self._made(one)) for k, one in enumerate(stacked)]
            return [Interval(0, length, self._made(node))]
        if isinstance(how, Joined):
            found: list[Interval] = []
            for part in how.parts:
                for run in self.runs(part.node, part.dim, depth + 1):
                    low = max(run.start - part.offset, 0) + part.start
                    high = min(run.stop - part.offset + part.start, part.stop)
                    if low < high:
                        found.append(Interval(low, high, run.made))
            return found
        # If each position has its own weight (heads in a batched product), each position is a run.
        if how.own_rows and any(map(self.is_weight, how.reads)):
            return [Interval(k, k + 1, frozenset([(node, k)])) for k in range(length)]
        if how.reads and all(map(self.is_weight, how.reads)):  # columns of one weight
            return [Interval(0, length, self.made_of(node))]
        # The first entry covers the whole axis, even if no operand has this axis.
        layers = [[Interval(0, length, frozenset())]]
        for operand, place in how.reads.items():
            runs = self.runs(operand, place.dim, depth + 1)
            layers.append([_scaled(r, how.unit, place.inner) for r in _on_whole(runs, place.inner)])
        return _overlaid(layers)

    def _made(self, node: fx.Node) -> Made:
        # The caller's ends and weights do not tell positions apart.
        return frozenset() if node in self.ends or self.is_weight(node) else self.made_of(node)

    def core(self, node: fx.Node, dim: int, products: Collection[fx.Node]) -> dict[tuple[fx.Node, int], Blind] | None:
        """Map each operator between ``products`` and ``node``, with its axis, to its step along this axis.

        ``dim`` is the axis of ``node``. Return None if an operator joins the axis or mixes its positions.
        """
        found: dict[tuple[fx.Node, int], Blind] = {}
        queue = [(node, dim)]
        while queue:
            one = queue.pop()
            if one in found:
                continue
            how = self.step(*one)
            # If the core joins or mixes the axis, its parts are not separate attentions.
            if not isinstance(how, Blind):
                return None
            found[one] = how
            if one[0] not in products:
                inside = [(n, p.dim) for n, p in how.reads.items() if _leads_to(products, n, self.ends)]
                whole = [n for n in one[0].all_input_nodes if n not in how.reads and n not in self.ends]
                # If an operand that is read whole depends on the scores, the groups are not independent.
                if any(_leads_to(products, n, self.ends) for n in whole):
                    return None
                queue += inside
        return found


def _leads_to(first: Collection[fx.Node], last: fx.Node, ends: Collection[fx.Node]) -> bool:
    """Whether ``last`` is computed from one of ``first``, without looking upstream of ``ends``."""
    return any(n in first for n in reachable([last], lambda node: (n for n in node.all_input_nodes if n not in ends)))


def _scaled(run: Interval, unit: int, inner: int) -> Interval:
    return Interval(run.start // inner * unit, run.stop // inner * unit, run.made)


def _on_whole(runs: Sequence[Interval], inner: int) -> list[Interval]:
    """Keep only the cuts of ``runs`` that lie between two units of ``inner`` positions."""
    found: list[Interval] = []
    for run in runs:
        # A cut inside a unit would split a position of the result, so the previous run is extended instead.
        if found and found[-1].stop % inner:
            found[-1] = Interval(found[-1].start, run.stop, found[-1].made | run.made)
        else:
            found.append(run)
    return found


def _overlaid(layers: Sequence[Sequence[Interval]]) -> list[Interval]:
    """Combine the runs of several operands along one axis. The result is cut wherever an operand is cut."""
    cuts = sorted({r.start for runs in layers for r in runs} | {r.stop for runs in layers for r in runs})
    found: list[Interval] = []
    for start, stop in pairwise(cuts):
        made = (r.made for runs in layers for r in runs if r.start <= start and stop <= r.stop)
        found.append(Interval(start, stop, frozenset().union(*made)))
    return found


def _merged(runs: Iterable[Interval]) -> tuple[Interval, ...]:
    found: list[Interval] = []
    for run in runs:
        if found and found[-1].made == run.made:
            found[-1] = replace(found[-1], stop=run.stop)
        else:
            found.append(run)
    return tuple(found)


def _long(node: fx.Node) -> int:
    """Return the first axis with more than one position; 0 if there is none. Other axes have no step."""
    return next((k for k, d in enumerate(shape(node)) if isinstance(d, int) and d > 1), 0)


class PartMaker(Repeater):
    """Adds the nodes that compute parts. Existing parts and whole nodes are reused."""

    def __init__(
        self,
        parts: AxisParts,
        anchor: fx.Node,
        fake_mode: FakeTensorMode | None,
        core: Collection[tuple[fx.Node, int]],
    ) -> None:
        super().__init__(Builder(anchor, fake_mode))
        self.parts = parts
        self.core = core
        self._made: dict[tuple[fx.Node, int, int, int], fx.Node] = {}

    def make(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        """Return positions ``start`` to ``stop`` of axis ``dim`` of ``node``."""
        # This check comes first, because a whole node must not be built a second time.
        if start == 0 and stop == shape(node)[dim]:
            return self._copied(node)
        key = (node, dim, start, stop)
        if key not in self._made:
            self._made[key] = self._new(*key)
        return self._made[key]

    def _copied(self, node: fx.Node) -> fx.Node:
        """Return the copied tensor if ``node`` is a copy into a target. Otherwise return ``node``.

        The copy itself is skipped.
        """
        while isinstance(decode(node), Assign) and isinstance(how := self.parts.step(node, _long(node)), Joined):
            node = how.parts[0].node
        return node

    def _new(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        how = self.parts.step(node, dim)
        # If all positions have the same dependences, a slice is cheaper than repeating the operators.
        further = (node, dim) in self.core or len(self.parts.runs(node, dim)) > 1
        if further and (stacked := self.parts.stacked(node, dim)) is not None:
            return self.builder.call(aten.stack.default, list(stacked[start:stop]), dim)
        if how is None or not further:
            return self._slice(node, dim, start, stop)
        if isinstance(how, Joined):
            inside = [p for p in how.parts if p.start < stop and start < p.stop]
            made = [
                self.make(p.node, p.dim, *(min(max(at, p.start), p.stop) - p.start + p.offset for at in (start, stop)))
                for p in inside
            ]
            return made[0] if len(made) == 1 else self.builder.call(aten.cat.default, made, dim)
        # A part that starts or ends within a unit has to be sliced from the whole result.
        if start % how.unit or stop % how.unit:
            return self._slice(node, dim, start, stop)
        new = {
            n: self.make(n, p.dim, start // how.unit * p.inner, stop // how.unit * p.inner)
            for n, p in how.reads.items()
        }
        return self.repeat(node, how, dim, stop - start, new)

    def _slice(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        part = self.builder.call(aten.slice.Tensor, node, dim, start, stop)
        self.parts.cut(node, part)
        return part
