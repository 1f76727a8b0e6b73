"""Which obligations the keys and values of any attention break, told from numbers.

K and V are made of rows: what the nearest up-projections read, and the floating inputs that no up-projection reads.
These are given numbers of our own, and what K and V do is watched: whether a token of theirs moves with the rows of one
token, whether it is an affine map of them, the same map for every token, and whether all heads read the same. Nothing
here uses the linear maps of ``passes``; where the attentions are, and which axes hold keys and heads, is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from mla_compile.core.program import Program
from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.operators import (
    Broadcast,
    Copy,
    Join,
    Permute,
    Regroup,
    Repeat,
    Slice,
    decode,
    is_contraction,
)
from mla_compile.passes.ir.walk import reachable, weight_nodes

NEGLIGIBLE = 1e-9


@dataclass
class Rows:
    """Rows that K or V are made of; ``projected``: by an up-projection. ``weighed``: by weights, or made by weights."""

    node: fx.Node
    projected: bool
    weighed: bool
    tokens: list[int] = field(default_factory=list)


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
        """What each side breaks, by the names in :data:`TRUE`."""
        sides = {side: _Side(self, side) for side in self.sides}
        near = {side: _Side(self, side, nearest=True) for side in self.sides}
        found = self._of_site()
        found |= {f"{side} read" for side in sides if self._read_elsewhere(sides[side].products | near[side].products)}
        behind = set(reachable([o.node for o in self.site.between], lambda n: n.all_input_nodes))
        if any(behind & {*near[side].products, *self.operands(side)} for side in sides):
            found.add("mask")
        rows = {r.node: of.width(r) for of in sides.values() for r in of.rows}
        if sum(rows.values()) >= sum(of.heads * of.at.shape[2] for of in sides.values()):
            found.add("wide")
        heads = {side: any(of.tells_heads_apart() for of in (sides[side], near[side])) for side in sides}
        return {
            side: frozenset(of.broken() | found | ({"heads"} if heads[side] else set())) for side, of in sides.items()
        }

    def operands(self, side: str) -> list[fx.Node]:
        return [o.node for o in self.sides[side]]

    def lines(self, values: Mapping[fx.Node, Any], side: str) -> Tensor:
        """One side as [lead, tokens, columns]."""
        outer = (*self.site.lead, *self.site.keys)
        parts, sizes = [], {a: int(a.size) for a in outer}
        for operand in self.sides[side]:
            value, atoms = values[operand.node], flatten(operand.axes)
            value = value.reshape([int(a.size) for a in atoms])
            for atom in outer:
                if atom not in atoms:
                    value, atoms = value.unsqueeze(0).expand(sizes[atom], *value.shape), (atom, *atoms)
            order = [atoms.index(a) for a in (*outer, *(a for a in atoms if a not in outer))]
            value = value.permute(order)
            lead, tokens = (math.prod(sizes[a] for a in axis) for axis in (self.site.lead, self.site.keys))
            parts.append(value.reshape(lead, tokens, -1))
        return torch.cat(parts, -1).double()

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
        if _differ(*drawn):
            found.add("random")
        if counters["graph_break"]:
            found.add("broken")
        if site.probs is not None and site.problem is not None and site.problem.code == "softmax_axis":
            probs = self.values[site.probs.node].double()
            along = [d for d, own in enumerate(site.probs.axes) if set(own) & set(site.keys)]
            sums = probs.sum(along) if along else probs
            if _differ(sums, torch.ones_like(sums)):
                found.add("no softmax of keys")
        keys, values = (self.lines(self.values, side) for side in self.sides)
        if any(not _differ(keys[:, :, c], values[:, :, 0]) for c in range(keys.shape[2])):
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
                if isinstance(self.values[n], Tensor) and n not in held and _differ(after[n], self.values[n]):
                    return True
        return False


class _Side:
    """One side of an attention, as a function of its rows."""

    def __init__(self, of: Obligations, side: str, *, nearest: bool = False) -> None:
        self.of, self.side = of, side
        self.at = of.lines(of.values, side)
        self.lead, self.tokens = self.at.shape[:2]
        # Heads of one batch entry stand side by side.
        self.batch = of.batch if of.site.lead and of.site.lead[0].size == of.batch else 1
        self.heads = self.lead // self.batch
        self.products: set[fx.Node] = set()
        self.rows = self._found(nearest)
        nodes = [r.node for r in self.rows]
        self.through = of.between(nodes, of.operands(side))
        self.moves: dict[tuple[fx.Node, int], Tensor] = {}
        for rows in self.rows:
            self._measure(rows)
        # What lies behind other rows only moves nothing.
        self.rows = [r for r in self.rows if any(bool(m.any()) for (n, _), m in self.moves.items() if n is r.node)]

    def _found(self, nearest: bool) -> list[Rows]:
        """The rows: what is behind an operator that makes more of it than there is, and inputs that none reads.

        ``nearest``: or behind any product with a weight, or what the model returns, which may be a cache.
        """
        of, found = self.of, dict[fx.Node, Rows]()
        one_head = max(v.numel() for v in (of.values[n] for n in of.operands(self.side))) / self.heads
        pending, seen = [(n, False) for n in of.operands(self.side)], set()
        while pending:
            node, weighed = pending.pop()
            if (node, weighed) in seen:
                continue
            seen.add((node, weighed))
            inputs = [n for n in node.all_input_nodes if n in of.moving]
            product = is_contraction(node) and len(inputs) == 1 and len(node.all_input_nodes) > 1
            before = of.size(inputs[0]) if len(inputs) == 1 else math.inf
            copied = isinstance(decode(node), (Broadcast, Repeat)) and before <= one_head
            if (before < of.size(node) and (product or copied)) or (nearest and product):
                self.products |= {node} if product else set()
                found[inputs[0]] = Rows(inputs[0], product, product or weighed or inputs[0] in of.made)
            elif node.op in ("placeholder", "get_attr") or (nearest and node in of.returned):
                found[node] = Rows(node, False, weighed)
            else:
                pending += [(n, weighed or product) for n in inputs]
        return list(found.values())

    def values(self, given: Mapping[fx.Node, Tensor], seed: int = 0) -> Tensor:
        return self.of.lines(self.of.run(given, self.through, seed), self.side)

    def draw(self, seed: int) -> dict[fx.Node, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for rows in self.rows:
            value = self.of.values[rows.node]
            shape = [1 if value.stride(d) == 0 else s for d, s in enumerate(value.shape)]
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn[rows.node] = noise.to(value.dtype).expand(value.shape)
        return drawn

    def _moved(self, given: Mapping[fx.Node, Tensor], than: Tensor) -> Tensor:
        """[lead, tokens], True where K or V are others."""
        change = (self.values({**self.one, **given}) - than).nan_to_num(1.0).abs().amax(2)
        return change > self.limit * than.nan_to_num(1.0).abs().amax()

    @cached_property
    def limit(self) -> float:
        dtypes = [v.dtype for n in self.through if isinstance(v := self.of.values[n], Tensor) and v.is_floating_point()]
        return max([NEGLIGIBLE, *(1e4 * torch.finfo(d).eps for d in dtypes if d.itemsize > 1 and d != torch.float64)])

    @cached_property
    def one(self) -> dict[fx.Node, Tensor]:
        return self.draw(1)

    @cached_property
    def other(self) -> dict[fx.Node, Tensor]:
        return self.draw(2)

    @cached_property
    def of_one(self) -> Tensor:
        return self.values(self.one)

    def _measure(self, rows: Rows) -> None:
        """What every position of every axis of ``rows`` moves; the axes of tokens are those that tell tokens apart."""
        node, shape = rows.node, self.of.values[rows.node].shape
        for axis, size in enumerate(shape):
            moved = []
            for i in range(size):
                at = torch.arange(size).view([-1 if d == axis else 1 for d in range(len(shape))]) == i
                moved.append(self._moved({node: torch.where(at, self.other[node], self.one[node])}, self.of_one))
            self.moves[node, axis] = torch.stack(moved) if moved else torch.zeros(0, self.lead, self.tokens).bool()
            seen = self.moves[node, axis].any(1)
            if size > 1 and self.tokens > 1 and bool((seen != seen[:1]).any()):
                rows.tokens.append(axis)
        if not rows.tokens:  # all are mixed, or there is one
            rows.tokens = [a for a, size in enumerate(shape) if size == self.tokens][:1] if self.tokens > 1 else []

    def broken(self) -> set[str]:
        found = set()
        of, one, other = self.of, self.one, self.other
        if self._differs(self.values(one, seed=1), self.of_one):
            found.add("random")
        zero = self.values({n: 0 * v for n, v in one.items()})
        for size in (1.0, 30.0):
            big, more = ({n: size * v for n, v in x.items()} for x in (one, other))
            total = self.values({n: big[n] + more[n] for n in big})
            if self._differs(total + zero, self.values(big) + self.values(more)):
                found.add("nonlinear")
        if any(self._mixes(self.moves[r.node, a]) for r in self.rows for a in r.tokens):
            found.add("mixed")
        if self._differs_by_own_token() if "mixed" in found else self._differs_by_position():
            found.add("position")
        if any(not r.tokens for r in self.rows) and self.tokens > 1:
            found.add("weight")
        if len(self.rows) > 1:
            found.add("several")
        if self.width_of(self.rows) >= self.heads * self.at.shape[2]:
            found.add("wide")
        projected = [r for r in self.rows if r.projected]
        if not projected:
            found.add("unprojected")
        elif all(r.node in of.of_queries for r in projected):
            found.add("hidden")
        if any(not r.weighed and _given(r.node) for r in self.rows):
            found.add("given")
        return found

    def _differs(self, a: Tensor, b: Tensor) -> bool:
        return _differ(a, b, self.limit)

    def width_of(self, rows: Sequence[Rows]) -> float:
        return sum(map(self.width, rows))

    def width(self, rows: Rows) -> float:
        """Values per token of a batch entry."""
        return self.of.values[rows.node].numel() / self.tokens / self.batch

    def _mixes(self, moved: Tensor) -> bool:
        """Whether some token of K or V moves with several of the rows' tokens, or later ones with earlier ones."""
        tokens = moved.unflatten(1, (self.batch, self.heads)).any(2)  # in any head
        if bool((tokens.sum(0) > 1).any()):
            return True
        each = (one[:, one.any(0)].int().argmax(0) for one in tokens.unbind(1))
        return any(bool((order.diff() <= 0).any()) for order in each)

    def tells_heads_apart(self) -> bool:
        """Whether one position of an axis moves some heads of a batch entry, and not others."""
        if self.heads == 1:
            return False
        each = (moved.any(2).unflatten(1, (self.batch, self.heads)) for moved in self.moves.values())
        return any(bool((some.any(2) & ~some.all(2)).any()) for some in each)

    def _differs_by_position(self) -> bool:
        """Whether equal rows make unequal K or V at two tokens that depend on the same.

        Inputs that no weight stands before, which may be tables of positions, are equal first, and in their own numbers
        then: of those only what they are multiplied with counts.
        """
        weighed = [r for r in self.rows if r.weighed]
        alike = self._alike(self.rows, self.one)
        if self._unequal(self.values(alike), self.rows):
            return True
        own = {r.node: self.of.values[r.node] for r in self.rows if not r.weighed}
        if not weighed or not own:
            return False
        alike = self._alike(weighed, self.one)
        zero = {n: 0 * v for n, v in alike.items()}
        return self._unequal(self.values({**own, **alike}) - self.values({**own, **zero}), weighed)

    def _differs_by_own_token(self) -> bool:
        """The same where tokens are mixed: whether what a token of K or V has of its own row differs by position."""
        zero = {n: 0 * v for n, v in self.one.items()}
        nothing, found = self.values(zero), []
        for rows in self.rows:
            for axis in (a for a in rows.tokens if self.one[rows.node].shape[a] == self.tokens):
                value = self._alike([rows], self.one)[rows.node]
                each = []
                for t in range(self.tokens):
                    at = torch.arange(self.tokens).view([-1 if d == axis else 1 for d in range(value.dim())]) == t
                    given = {**zero, rows.node: torch.where(at, value, 0)}
                    each.append((self.values(given) - nothing)[:, t])
                found.append(any(self._differs(one, each[0]) for one in each))
        return any(found)

    def _alike(self, rows: Sequence[Rows], drawn: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
        found = {}
        for r in rows:
            value = drawn[r.node]
            for a in r.tokens:
                value = value.narrow(a, 0, 1).expand(value.shape)
            found[r.node] = value
        return found

    def _unequal(self, lines: Tensor, rows: Sequence[Rows]) -> bool:
        cover = torch.stack([self.moves[r.node, a].any(0) for r in rows for a in r.tokens[:1]] or [lines[..., 0] == 0])
        limit = self.limit * 10 * lines.nan_to_num(1.0).abs().amax()
        for t in range(1, self.tokens):
            for u in range(t):
                same = (cover[:, :, t] == cover[:, :, u]).all(0) & cover[:, :, t].any(0)
                if bool(((lines[:, t] - lines[:, u]).nan_to_num(1.0).abs().amax(1) > limit)[same].any()):
                    return True
        return False


def _given(node: fx.Node) -> bool:
    """Whether a node is of inputs: cut, copied, joined, put in another order."""
    if node.op == "placeholder":
        return True
    moves = isinstance(decode(node), (Broadcast, Copy, Join, Permute, Regroup, Repeat, Slice))
    return moves and all(map(_given, node.all_input_nodes))


def _differ(a: Tensor, b: Tensor, limit: float = NEGLIGIBLE) -> bool:
    if not b.numel():
        return False
    if not b.is_floating_point():
        return not torch.equal(a, b)
    scale = b.nan_to_num(1.0).abs().amax().clamp(min=1e-6)
    return bool((a - b).nan_to_num(1.0).abs().amax() > limit * scale)
