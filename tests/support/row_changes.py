"""One side of an attention, its keys or its values, as a function of the rows that it is made of.

:mod:`tests.support.obligations` says what is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from mla_compile.passes.ir.axes import Axes
from mla_compile.passes.ir.moves import Copy, Join, Rearrange, Repeat, Slice
from mla_compile.passes.ir.operators import decode, is_contraction

if TYPE_CHECKING:
    from tests.support.obligations import Obligations

NEGLIGIBLE = 1e-9


@dataclass
class Rows:
    """Rows that K or V are made of; ``projected``: by an up-projection. ``weighed``: by weights, or made by weights."""

    node: fx.Node
    projected: bool
    weighed: bool
    tokens: list[int] = field(default_factory=list)


class Side:
    """One side of an attention, as a function of its rows."""

    def __init__(
        self,
        of: Obligations,
        side: str,
        *,
        nearest: bool = False,
        copies: bool = True,
        furthest: bool = False,
        cuts: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.of, self.side = of, side
        self.at = of.lines(of.values, side)
        self.lead, self.tokens = self.at.shape[:2]
        # Heads of one batch entry stand side by side.
        self.batch = of.batch if of.site.lead and of.sizes[of.site.lead[0]] == of.batch else 1
        self.heads = self.lead // self.batch
        self.products: set[fx.Node] = set()
        self.copies: set[fx.Node] = set()
        self.furthest = furthest
        self.rows = self._found(cuts, nearest=nearest, copies=copies)
        nodes = [r.node for r in self.rows]
        self.through = of.between(nodes, of.operands(side))
        self.moves: dict[tuple[fx.Node, int], Tensor] = {}
        for rows in self.rows:
            self._measure(rows)
        # What lies behind other rows only moves nothing.
        self.rows = [r for r in self.rows if any(bool(m.any()) for (n, _), m in self.moves.items() if n is r.node)]

    def _found(self, cuts: frozenset[fx.Node], *, nearest: bool, copies: bool) -> list[Rows]:
        """The rows: what is behind an operator that makes more of it than there is, and inputs that none reads.

        ``nearest``: or behind any product with a weight, or what the model returns, which may be a cache. ``copies``:
        copies of what all heads share are such operators, too. ``furthest``: and what makes more of something narrower
        still is no row. ``cuts``: these are the rows, and inputs that none of
        them is made of.
        """
        of, found = self.of, dict[fx.Node, Rows]()
        one_head = max(v.numel() for v in (of.values[n] for n in of.operands(self.side))) / self.heads
        pending, seen = [(n, False) for n in of.operands(self.side)], set()
        while pending:
            node, weighed = pending.pop()
            if (node, weighed) in seen:
                continue
            seen.add((node, weighed))
            inputs = of.moving_inputs(node)
            product = of.is_product(node)
            before = of.size(inputs[0]) if len(inputs) == 1 else math.inf
            copied = copies and isinstance(decode(node), Repeat) and before <= one_head
            if cuts:
                stops = node in cuts or node.op in ("placeholder", "get_attr")
                found |= {node: Rows(node, node in cuts, node in of.made)} if stops else {}
                pending += [] if stops else [(n, weighed) for n in inputs]
            elif (before < of.size(node) and (product or copied)) or (nearest and product):
                (self.products if product else self.copies).add(node)
                if self.furthest and self._widens(inputs[0]):
                    pending.append((inputs[0], weighed or product))
                    continue
                found[inputs[0]] = Rows(inputs[0], product, product or weighed or inputs[0] in of.made)
            elif node.op in ("placeholder", "get_attr") or (nearest and node in of.returned):
                found[node] = Rows(node, False, weighed)
            else:
                pending += [(n, weighed or product) for n in inputs]
        return list(found.values())

    def _widens(self, node: fx.Node) -> bool:
        """Whether a node makes more numbers of what one operand holds: a product, or copies."""
        inputs = self.of.moving_inputs(node)
        more = len(inputs) == 1 and self.of.size(inputs[0]) < self.of.size(node)
        return more and (is_contraction(node) or isinstance(decode(node), Repeat))

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
        alike = [r.node for r in self.rows if not r.tokens and self.tokens > 1]
        if alike or any(is_contraction(n) and sum(i in of.moving for i in n.all_input_nodes) > 1 for n in self.through):
            found.add("weight")
        if any(node.op not in ("placeholder", "get_attr") for node in alike):  # made of some tokens, read by all
            found.add("mixed")
        if any(map(self._crosses, self.moves.values())):
            found.add("crossed")
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
        return differ(a, b, self.limit)

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

    def _crosses(self, moved: Tensor) -> bool:
        """Whether the positions of an axis tell sequences apart, and one moves several or one is moved by several."""
        each = moved.any(2).unflatten(1, (self.batch, self.heads)).any(2)
        crosses = (each.sum(0) > 1).any() | (each.sum(1) > 1).any()
        return bool((each != each[:1]).any() & crosses)

    def made_of_wide_rows(self) -> bool:
        """Whether products make no more numbers of some rows than these hold."""
        read = {r.node: [n for n in self.products if r.node in n.all_input_nodes] for r in self.rows}
        return any(made and sum(map(self.of.size, made)) <= self.of.size(node) for node, made in read.items())

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
    moves = isinstance(decode(node), (Copy, Join, Rearrange, Slice))
    return moves and all(map(_given, node.all_input_nodes))


def differ(a: Tensor, b: Tensor, limit: float = NEGLIGIBLE) -> bool:
    if not b.numel():
        return False
    if not b.is_floating_point():
        return not torch.equal(a, b)
    scale = b.nan_to_num(1.0).abs().amax().clamp(min=1e-6)
    return bool((a - b).nan_to_num(1.0).abs().amax() > limit * scale)


def by_atoms(value: Tensor, axes: Axes) -> Tensor:
    """``value`` with one axis for each atom."""
    for d in reversed(range(value.dim())):
        own = [a.size if isinstance(a.size, int) else -1 for a in axes[d]]
        value = value.unflatten(d, own) if own else value.squeeze(d)
    return value
