"""Dependences between nodes, for look-ups in every layer.

Residual connections link every layer to the first one. Results are therefore kept per node, and no look-up visits a
node again. A set of nodes is an integer used as a bit set.
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
    """Knows what the nodes of one graph are computed from.

    ``asked`` maps the output of each attention to its queries.
    """

    def __init__(self, asked: Mapping[fx.Node, list[fx.Node]] = MappingProxyType({})) -> None:
        self.asked = asked
        self._bits: dict[fx.Node, int] = {}
        # Each dict maps a node to a set of nodes upstream of it, including the node itself: all such nodes (`_all`),
        # tensors with no projection in between (`_plain`), or tensors with at most one projection in between
        # (`_projected`).
        self._all: dict[fx.Node, int] = {}
        self._plain: dict[fx.Node, int] = {}
        self._projected: dict[fx.Node, int] = {}

    def same_rows(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether one of two tensors is computed from the other, or both are projected from the same rows.

        Only tensors at most one projection upstream are compared. Farther upstream, all layers are related: through the
        first layer, the rows of all later layers depend on the table of rotary angles.
        """
        for node in (one, other):
            for n in _inputs_first(node, _tensors, self._plain):
                self._look_behind(n)
        if self._bits[one] & self._projected[other] or self._bits[other] & self._projected[one]:
            return True
        return bool(self._projected[one] & ~self._plain[one] & self._projected[other] & ~self._plain[other])

    def behind(self, nodes: Iterable[fx.Node]) -> Container[fx.Node]:
        """Return ``nodes`` and everything they depend on, except through keys and values of earlier attentions.

        The nodes upstream of queries are treated as hidden states. Without the exception, an earlier layer's latent,
        which a later layer may read again, would be treated as a hidden state too.
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
