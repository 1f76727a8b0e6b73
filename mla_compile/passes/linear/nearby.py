"""Caches the dependences between nodes, which are looked up in every layer.

Residual connections link every layer to the first layer. Without a cache, each look-up would walk the whole model. A
set of nodes is stored as an integer, with one bit per node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from mla_compile.passes.ir.graph import is_tensor, packet, whole_rows
from mla_compile.passes.ir.operators import PRODUCTS
from mla_compile.passes.ir.walk import computed_from


class Nearby:
    """Looks up the nodes of one graph from which a node is computed.

    ``asked`` maps the output of each attention to its queries.
    """

    def __init__(self, asked: Mapping[fx.Node, list[fx.Node]] = MappingProxyType({})) -> None:
        self.asked = asked
        self._bits: dict[fx.Node, int] = {}
        # Each dict maps a node to a set that contains the node itself and nodes upstream: those that `behind` finds
        # (`_all`), tensors with no projection in between (`_plain`), or tensors with at most one (`_projected`).
        self._all: dict[fx.Node, int] = {}
        self._plain: dict[fx.Node, int] = {}
        self._projected: dict[fx.Node, int] = {}

    def same_rows(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether one of two tensors is computed from the other, or both are projected from the same rows.

        Only tensors at most one projection upstream are compared. Farther upstream, everything is related. For example,
        rows of all later layers depend on the rotary angles through the first layer.
        """
        for node in (one, other):
            for n in _inputs_first(node, _tensors, self._plain):
                self._look_behind(n)
        if self._bits[one] & self._projected[other] or self._bits[other] & self._projected[one]:
            return True
        return bool(self._projected[one] & ~self._plain[one] & self._projected[other] & ~self._plain[other])

    def behind(self, nodes: Iterable[fx.Node]) -> Container[fx.Node]:
        """Return ``nodes`` and their ancestors. The search skips keys and values of earlier attentions.

        Callers treat ancestors of queries as hidden states. An earlier layer's latent is not a hidden state, and a
        later layer may read the latent again.
        """
        found = 0
        for node in nodes:
            for n in _inputs_first(node, self._before, self._all):
                self._all[n] = self._bit(n)
                for read in self._before(n):
                    self._all[n] |= self._all[read]
            found |= self._all[node]
        return _Nodes(found, self._bits)

    def _before(self, node: fx.Node) -> list[fx.Node]:
        return self.asked.get(node) or computed_from(node)

    def _look_behind(self, node: fx.Node) -> None:
        plain = projected = self._bit(node)
        for n in _tensors(node):
            if packet(node) in PRODUCTS:
                projected |= self._plain[n]
            else:
                plain |= self._plain[n]
                projected |= self._projected[n]
        self._plain[node], self._projected[node] = plain, projected

    def _bit(self, node: fx.Node) -> int:
        return self._bits.setdefault(node, 1 << len(self._bits))


@dataclass(frozen=True)
class _Nodes:
    """A set of nodes. A virtual slice of a node in the set is also in the set."""

    found: int
    bits: dict[fx.Node, int]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and bool(self.found & self.bits.get(whole_rows(node), 0))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if is_tensor(n)]


def _inputs_first(
    node: fx.Node, inputs: Callable[[fx.Node], list[fx.Node]], known: Container[fx.Node]
) -> Iterator[fx.Node]:
    """Yield ``node`` and the nodes upstream of it, each after its inputs, except nodes that are already ``known``."""
    pending = [node]  # an explicit stack, because chains are as deep as the model
    while pending:
        current = pending[-1]
        missing = [] if current in known else [n for n in inputs(current) if n not in known]
        if missing:
            pending += missing
            continue
        pending.pop()
        if current not in known:
            yield current
