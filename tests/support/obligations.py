"""Which obligations the keys and values of any attention break, told from numbers.

K and V are made of rows: what the nearest up-projections read, and the floating inputs that no up-projection reads.
These are given numbers of our own, and what K and V do is watched: whether a token of theirs moves with the rows of one
token, whether it is an affine map of them, the same map for every token, and whether all heads read the same. Nothing
here uses the linear maps of ``passes``; where the attentions are, and which axes hold keys and heads, is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from mla_compile.core.program import Program, view_source
from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.walk import reachable, weight_nodes
from tests.support.row_changes import Side, by_atoms, differ


class Obligations:
    """K and V of one attention as functions of their rows."""

    def __init__(self, program: Program, site: AttentionSite, inputs: Sequence[Any], batch: int) -> None:
        self.program, self.site, self.batch = program, site, batch
        self.graph = program.gm.graph
        self.weights = weight_nodes(self.graph, program.weights)
        self.runner = fx.Interpreter(program.gm)
        self.values = self._run(dict(zip(program.placeholders, inputs, strict=True)))
        self.sides: dict[str, list[Operand]] = {"keys": [p.k for p in site.products], "values": [site.v]}

    def broken(self) -> dict[str, frozenset[str]]:
        """What each side, some columns of it and both sides break, by the names in :data:`TRUE`."""
        sides = {side: Side(self, side) for side in self.sides}
        near = {side: Side(self, side, nearest=True) for side in self.sides}
        found = self._of_site()
        made_by = {side: sides[side].products | self._nearest(side) for side in sides}
        found |= {f"{side} read" for side in sides if self._read_elsewhere(made_by[side])}
        behind = set(reachable([o.node for o in self.site.between], lambda n: n.all_input_nodes))
        if any(behind & {*near[side].products, *self.operands(side)} for side in sides):
            found.add("mask")
        rows = {r.node: of.width(r) for of in sides.values() for r in of.rows}
        if sum(rows.values()) >= sum(of.heads * of.at.shape[2] for of in sides.values()):
            found.add("wide")
        made = {side: {r.node for of in (sides, near) for r in of[side].rows} for side in sides}
        joint = {"keys": self._joint("keys", made["values"]), "values": self._joint("values", made["keys"])}
        heads = {side: any(of.tells_heads_apart() for of in (sides[side], near[side])) for side in sides}
        broken = {
            side: frozenset(
                of.broken() | found | joint[side] | self._copied(of) | (self._of_heads(of) if heads[side] else set())
            )
            for side, of in sides.items()
        }
        # Beside these, the other columns may come from rows that are narrower than what they make.
        wide = {side: frozenset({"wide"} if near[side].made_of_wide_rows() else ()) for side in sides}
        some = {f"some columns of the {side}": broken[side] | wide[side] for side in sides}
        return {**broken, **some, "both": broken["keys"] | broken["values"]}

    def _nearest(self, side: str) -> set[fx.Node]:
        """The nearest products with a weight behind one side, whatever is returned between."""
        ways = reachable(self.operands(side), lambda n: () if self.is_product(n) else self.moving_inputs(n))
        return {node for node in ways if self.is_product(node)}

    def is_product(self, node: fx.Node) -> bool:
        """Whether a node is a product of rows with a weight."""
        return is_contraction(node) and len(node.all_input_nodes) > len(self.moving_inputs(node)) == 1

    def moving_inputs(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self.moving]

    def _copied(self, side: Side) -> set[str]:
        """Whether tokens are mixed behind what is copied, to heads or to tokens, or between rows made of each other."""
        sides = [Side(self, side.side, furthest=True)]
        if side.copies:
            sides.append(Side(self, side.side, nearest=True, copies=False))
        rows = {r.node for r in side.rows}
        first = frozenset(n for n in rows if rows.isdisjoint(reachable(n.all_input_nodes, lambda m: m.all_input_nodes)))
        if first != rows:
            sides.append(Side(self, side.side, cuts=first))
        return {"mixed"} if any("mixed" in of.broken() for of in sides) else set()

    def _of_heads(self, side: Side) -> set[str]:
        """What is broken where heads have rows of their own; what all share lies behind these, if it is narrower.

        Rows of the side that others are made of are shared, too. What the queries are made of, too, would be no latent
        if nothing lay between.
        """
        own = {r.node for r in side.rows}
        behind = reachable(own, self.moving_inputs)
        made = ((n, self.moving_inputs(n)) for n in behind if self.is_product(n))
        shared = ((n, rows) for n, (rows,) in made if rows not in self.of_queries)
        cuts = frozenset(rows for n, rows in shared if rows in own or self.size(rows) < self.size(n))
        nonlinear = Side(self, side.side, cuts=cuts).broken() & {"nonlinear"} if cuts else set()
        return {"heads"} | nonlinear

    def _joint(self, side: str, rows: Iterable[fx.Node]) -> set[str]:
        """What one side breaks as a function of the rows of the other, as far as it is made of them."""
        behind = set(reachable(self.operands(side), lambda n: n.all_input_nodes))
        seen = {self._viewed(node) for node in rows}
        cuts = frozenset(node for node in seen if node in behind and node.op not in ("placeholder", "get_attr"))
        return Side(self, side, cuts=cuts).broken() & {"mixed", "crossed", "nonlinear", "position"} if cuts else set()

    def _viewed(self, node: fx.Node) -> fx.Node:
        """The tensor that ``node`` shows in another layout, which both sides may read by views of their own."""
        while (source := view_source(node)) is not None and self.size(source) == self.size(node):
            node = source
        return node

    def operands(self, side: str) -> list[fx.Node]:
        return [o.node for o in self.sides[side]]

    def lines(self, values: Mapping[fx.Node, Any], side: str) -> Tensor:
        """One side as [lead, tokens, columns]."""
        outer = (*self.site.lead, *self.site.keys)
        parts, sizes = [], self.sizes
        for operand in self.sides[side]:
            value, atoms = by_atoms(values[operand.node], operand.axes), flatten(operand.axes)
            for atom in outer:
                if atom not in atoms:
                    value, atoms = value.unsqueeze(0).expand(sizes[atom], *value.shape), (atom, *atoms)
            order = [atoms.index(a) for a in (*outer, *(a for a in atoms if a not in outer))]
            value = value.permute(order)
            lead, tokens = (math.prod(sizes[a] for a in axis) for axis in (self.site.lead, self.site.keys))
            parts.append(value.reshape(lead, tokens, -1))
        return torch.cat(parts, -1).double()

    @cached_property
    def sizes(self) -> dict[Atom, int]:
        """How long the axes of the operands are in this call, where the graph may have symbols."""
        operands = [o for p in self.site.products for o in (p.q, p.k)] + [self.site.v]
        shapes = [(flatten(o.axes), by_atoms(self.values[o.node], o.axes).shape) for o in operands]
        return {atom: n for atoms, shape in shapes for atom, n in zip(atoms, shape, strict=True)}

    def run(self, given: Mapping[fx.Node, Any], through: Sequence[fx.Node], seed: int = 0) -> dict[fx.Node, Any]:
        """All values where those of ``given`` are others; ``through``: the nodes that may change, in order."""
        torch.manual_seed(seed)
        return self._run(given, through)

    def _run(self, given: Mapping[fx.Node, Any], through: Sequence[fx.Node] | None = None) -> dict[fx.Node, Any]:
        self.runner.env = {**({} if through is None else self.values), **given}
        with torch.no_grad():
            for node in self.graph.nodes if through is None else through:
                if node not in given and node.op != "output":
                    self.runner.env[node] = self.runner.run_node(node)
        return dict(self.runner.env)

    def between(self, rows: Sequence[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
        """What is computed from ``rows`` and leads to ``ends``, in order; and what is drawn at random."""
        behind, moved = set(reachable(ends, lambda n: n.all_input_nodes)), set(rows)
        found = []
        for node in self.graph.nodes:
            drawn = node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node in behind and node not in moved and (drawn or any(n in moved for n in node.all_input_nodes)):
                moved.add(node)
                found.append(node)
        return found

    @cached_property
    def moving(self) -> set[fx.Node]:
        """What depends on floating inputs that are no weights."""
        return self._after(lambda n: n.op in ("placeholder", "get_attr") and n not in self.weights and self._floats(n))

    @cached_property
    def made(self) -> set[fx.Node]:
        """What a product with a weight made of inputs."""
        return self._after(lambda n: is_contraction(n) and n in self.moving) & self.moving

    def _after(self, starts: Callable[[fx.Node], bool]) -> set[fx.Node]:
        found = set()
        for node in self.graph.nodes:
            if starts(node) or any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def size(self, node: fx.Node) -> float:
        """How many numbers it holds; what holds no rows is as large as can be."""
        return float(self.values[node].numel()) if self._floats(node) else math.inf

    def _floats(self, node: fx.Node) -> bool:
        value = self.values[node]
        return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0

    @cached_property
    def returned(self) -> set[fx.Node]:
        return set(self.graph.output_node().all_input_nodes)

    @cached_property
    def of_queries(self) -> set[fx.Node]:
        return set(reachable([p.q.node for p in self.site.products], lambda n: n.all_input_nodes))

    def _of_site(self) -> set[str]:
        """What is broken beside K and V."""
        found, site = set(), self.site
        through = self.between([], [site.node])
        drawn = [self.run({}, through, seed)[site.node] for seed in (1, 2)]
        if differ(*drawn):
            found.add("random")
        # Dynamo counts no break at a branch on data; what follows it is in a function of Dynamo's own.
        if counters["graph_break"] or any("torch_dynamo_resume_in" in str(n.stack_trace) for n in self.graph.nodes):
            found.add("broken")
        if site.probs is not None and site.problem is not None and site.problem.code == "softmax_axis":
            probs = self.values[site.probs.node].double()
            along = [d for d, own in enumerate(site.probs.axes) if set(own) & set(site.keys)]
            sums = probs.sum(along) if along else probs
            if differ(sums, torch.ones_like(sums)):
                found.add("no softmax of keys")
        keys, values = (self.lines(self.values, side) for side in self.sides)
        if any(not differ(keys[:, :, c], values[:, :, 0]) for c in range(keys.shape[2])):
            found.add("same rows")
        return found

    def _read_elsewhere(self, made: Iterable[fx.Node]) -> bool:
        """Whether what is returned moves with a product that makes K or V while the attention's result does not."""
        held = {self.site.node: self.values[self.site.node]}
        if self.site.probs is not None:
            held[self.site.probs.node] = self.values[self.site.probs.node]
        for node in made:
            value = self.values[node]
            moved = {**held, node: value + torch.rand_like(value)}
            outputs = self.graph.output_node().all_input_nodes
            through = self.between([node], outputs)
            after = self.run(moved, through)
            for n in outputs:
                if isinstance(self.values[n], Tensor) and n not in held and differ(after[n], self.values[n]):
                    return True
        return False
