"""Concatenate rows before the projection to K and V, instead of concatenating K and V after the projection.

Before, with separate projections of the cached latents ``old`` and the latents ``new`` of new tokens::

    k = cat([view(linear(old, w), sizes), view(linear(new, w), sizes)], 1)

After::

    k = view(linear(cat([old, new], 1), w), sizes)

This requires that equal operators with equal weights make all parts and treat all tokens alike. Nothing else may read
the tensors in between, because these tensors would be computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mla_compile.passes.canonical.products import is_multiplied
from mla_compile.passes.dependence.again import Dim, Repeater
from mla_compile.passes.dependence.steps import Blind, per_position
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import ORIGIN, Builder, args_of, is_tensor, is_tuple, shape, val
from mla_compile.passes.ir.moves import Fill, Join, Rearrange, Select, Slice
from mla_compile.passes.ir.operators import behind, decode, is_contraction
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import REACH, first_equals, reachable, remove_dead_code

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class _Joined:
    """Tensors to be concatenated along axis ``dim``.

    If ``how`` is set, equal operators make all parts. The operands are then joined instead, and the operator runs once.
    ``pattern``: the part whose operator runs. ``operands``: for each operand of the pattern, the corresponding operands
    of all parts. ``fill``: if the parts are constant tensors, the fill of the joined tensor.
    """

    parts: tuple[fx.Node, ...]
    dim: int
    how: Blind | None = None
    pattern: fx.Node | None = None
    operands: Mapping[fx.Node, _Joined] = field(default_factory=dict)
    projected: bool = False
    fill: Fill | None = None

    def passed(self) -> set[fx.Node]:
        """Return the nodes that are no longer needed once the join has moved."""
        return {n for joined in self._all() if joined.how or joined.fill for n in _needed_for(joined.parts)}

    def read(self) -> set[fx.Node]:
        """Return the nodes that are joined unchanged."""
        return {n for joined in self._all() if not (joined.how or joined.fill) for n in joined.parts}

    def _all(self) -> Iterable[_Joined]:
        return reachable([self], lambda joined: joined.operands.values())


def join_rows(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Move joins of K and V upstream of the projection of their parts; return how many were moved."""
    count = 0
    # A joined tensor may be computed from the result of another join. The inner join is moved first, in its own round.
    while found := _movable(graph, weights):
        maker = _Maker(Builder(next(iter(found)), fake_mode))
        for node, joined in found.items():
            maker.builder = Builder(node, fake_mode)  # nodes made for earlier joins precede this node
            node.replace_all_uses_with(same_layout(maker.builder, maker.make(joined), node))
        remove_dead_code(graph)
        count += len(found)
    return count


def _movable(graph: fx.Graph, weights: Collection[fx.Node]) -> dict[fx.Node, _Joined]:
    """Return the joins that can be moved without computing anything twice."""
    joins: dict[fx.Node, Join] = {}
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        how = decode(node)
        if not isinstance(how, Join) or len(how.parts) < 2 or any(x.op != "call_function" for x in how.parts):
            continue
        if node not in weights and is_multiplied(node, weights):
            joins[node] = how
    equals = cache(lambda: first_equals(graph))
    ends: set[fx.Node] = set()
    while True:
        follower = _Follower(weights, equals, ends)
        followed = {node: follower.follow(tuple(_parts(how, how.dim)), how.dim) for node, how in joins.items()}
        found = {node: joined for node, joined in followed.items() if joined.projected}
        passed = {n for joined in found.values() for n in joined.passed()}
        read = {n for joined in found.values() for n in joined.read()}
        going = passed | found.keys()
        needed = {n for n in passed if n in read or any(_is_alive(user) for user in n.users.keys() - going)}
        of_joins = [node for node, joined in found.items() if not (joined.passed() | joined.read()).isdisjoint(found)]
        if not needed and not of_joins:
            return found
        ends |= needed
        for node in of_joins:  # moved in a later round, after the joins that they read
            del joins[node]


def _parts(how: Join, dim: int) -> Iterator[fx.Node]:
    """Yield the parts of a join along ``dim``. If a part is itself a join along ``dim``, yield its parts instead."""
    for x in how.parts:
        inner = decode(x)
        if isinstance(inner, Join) and inner.dim == dim:
            yield from _parts(inner, dim)
        else:
            yield x


def _is_alive(node: fx.Node) -> bool:
    return any(n.op == "output" for n in reachable([node], lambda n: n.users))


class _Follower:
    """Follows the parts of joins back to the operands from which they are made.

    ``equals``: returns a mapping from each node to the first node that computes the same value. ``ends``: nodes that
    are not followed further, because something else reads them.
    """

    def __init__(
        self, weights: Collection[fx.Node], equals: Callable[[], Mapping[fx.Node, fx.Node]], ends: set[fx.Node]
    ) -> None:
        self.weights, self.equals, self.ends = weights, equals, ends
        self._known: dict[tuple[tuple[fx.Node, ...], int, bool], _Joined] = {}

    def follow(self, parts: tuple[fx.Node, ...], dim: int, depth: int = 0, *, rows: bool = False) -> _Joined:
        """Follow ``parts`` to the operands of a projection.

        ``rows``: whether ``parts`` already lie upstream of the projection. If so, they are followed as far as possible.
        """
        key = (parts, dim, rows)
        if key not in self._known:
            self._known[key] = self._follow(parts, dim, depth, rows=rows)
        return self._known[key]

    def _follow(self, parts: tuple[fx.Node, ...], dim: int, depth: int, *, rows: bool) -> _Joined:
        if not self.ends.isdisjoint(_needed_for(parts)):
            return _Joined(parts, dim)
        as_they_are = _Joined(parts, dim, fill=_fill_of(parts))
        # In a part with one token, the token axis looks like a broadcast axis, so a longer part is the pattern.
        pattern = next((x for x in parts if not same(shape(x)[dim], 1)), None)
        how = None if pattern is None or depth == REACH else per_position(pattern, dim)
        if pattern is None or how is None or not how.reads:
            return as_they_are
        given = self._operands(parts, pattern, dim, how)
        projects = is_contraction(pattern)
        if given is None or (projects and not any(n in self.weights for n in pattern.all_input_nodes)):
            return as_they_are
        below = rows or projects
        operands = {own: self.follow(x, how.reads[own].dim, depth + 1, rows=below) for own, x in given.items()}
        projected = projects or any(one.projected for one in operands.values())
        if projected and not below:  # operands without a projection (a rotary key) are joined as rows
            operands = {
                own: one if one.projected else self.follow(given[own], one.dim, depth + 1, rows=True)
                for own, one in operands.items()
            }
        return _Joined(parts, dim, how, pattern, operands, projected) if projected or rows else as_they_are

    def _operands(
        self, parts: Sequence[fx.Node], pattern: fx.Node, dim: int, how: Blind
    ) -> dict[fx.Node, tuple[fx.Node, ...]] | None:
        """Map each operand of ``pattern`` that has the joined axis to the corresponding operands of all parts.

        Return None if the operators of the parts differ.
        """
        read = [_arguments(part, pattern, dim, how) for part in parts]
        own = read[parts.index(pattern)]
        if own is None or any(given is None or len(given) != len(own) for given in read):
            return None
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for mine, *given in zip(own, *(g for g in read if g is not None), strict=True):
            if isinstance(mine, fx.Node) and mine in how.reads:
                place = how.reads[mine].dim
                if not all(_fits(x, part, mine, place, dim) for x, part in zip(given, parts, strict=True)):
                    return None
                if found.setdefault(mine, tuple(given)) != tuple(given):
                    return None
            elif any(self._differs(mine, x) for x in given):
                return None
        return found

    def _differs(self, mine: object, given: object) -> bool:
        if isinstance(mine, fx.Node) and isinstance(given, fx.Node) and mine is not given:
            return self.equals()[mine] is not self.equals()[given]
        return mine != given


def _fill_of(parts: Sequence[fx.Node]) -> Fill | None:
    """Return the fill that all ``parts`` share; None if a part is not a constant tensor or the fills differ.

    A slice of a constant tensor, such as the unused rows of a buffer for K, is also constant.
    """
    first, *others = (decode(behind(x, (Slice, Select))[-1]) for x in parts)
    if not isinstance(first, Fill) or isinstance(first.value, fx.Node) or any(one != first for one in others):
        return None
    return first if len({val(x).dtype for x in parts}) == 1 else None


def _needed_for(parts: Sequence[fx.Node]) -> list[fx.Node]:
    """Return ``parts``, and the tuples (results of splits) from which some of them are taken."""
    return [*parts, *(n for x in parts for n in x.all_input_nodes if is_tuple(n))]


def _arguments(part: fx.Node, pattern: fx.Node, dim: int, how: Blind) -> list[object] | None:
    """Return the arguments of ``part`` that must match those of ``pattern``; None if the operators differ."""
    if how.instead is not None:
        own = decode(part)
        return [own.x, own.dim, *(own.bounds or ())] if isinstance(own, Slice) else None
    if how.reshaped:
        own = decode(part)
        sizes = [n for k, n in enumerate(shape(part)) if k != dim]
        return [own.x, type(own), *sizes] if isinstance(own, Rearrange) else None
    if part.target != pattern.target or val(part).dtype != val(pattern).dtype:
        return None
    return pytree.tree_leaves((args_of(part), part.kwargs))


def _fits(x: object, part: fx.Node, pattern: fx.Node, place: int, dim: int) -> bool:
    """Whether ``x`` has the dtype and shape of ``pattern``, but the token count of ``part`` along axis ``place``."""
    if not is_tensor(x) or len(shape(x)) != len(shape(pattern)) or val(x).dtype != val(pattern).dtype:
        return False
    others = (same(a, b) for k, (a, b) in enumerate(zip(shape(x), shape(pattern), strict=True)) if k != place)
    return same(shape(x)[place], shape(part)[dim]) and all(others)


class _Maker(Repeater):
    """Adds the operators over joined operands. An operator that several joins need is added once."""

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder)
        self._made: dict[tuple[tuple[fx.Node, ...], int], fx.Node] = {}

    def make(self, joined: _Joined) -> fx.Node:
        key = (joined.parts, joined.dim)
        if key not in self._made:
            self._made[key] = self._new(joined)
        return self._made[key]

    def _new(self, joined: _Joined) -> fx.Node:
        if joined.fill is not None:
            return self._filled(joined, joined.fill.value)
        if joined.how is None or joined.pattern is None:
            return self._join(joined)
        new = {own: self.make(operand) for own, operand in joined.operands.items()}
        own, made = next(iter(new.items()))
        length = self.builder.size(made, joined.how.reads[own].dim)
        return self.repeat(joined.pattern, joined.how, joined.dim, length, new)

    def _join(self, joined: _Joined) -> fx.Node:
        """Return a join of the parts: a join of the model, moved up if necessary, or a new join."""
        for user in joined.parts[0].users:
            how = decode(user)
            if isinstance(how, Join) and how.parts == joined.parts and how.dim == joined.dim:
                if not user < self.builder.anchor:
                    self.builder.anchor.prepend(user)
                # The untouched graph computes K and V from the parts. So a verification has to draw values for the
                # parts, not for the join.
                user.meta.pop(ORIGIN, None)
                return user
        return self.builder.call(aten.cat.default, list(joined.parts), joined.dim)

    def _filled(self, joined: _Joined, value: object) -> fx.Node:
        first, *others = joined.parts
        sizes = [self.builder.size(first, k) for k in range(len(shape(first)))]
        for x in others:
            sizes[joined.dim] = self._added(sizes[joined.dim], self.builder.size(x, joined.dim))
        return self.builder.filled(sizes, value, first)

    def _added(self, one: Dim, two: Dim) -> Dim:
        if isinstance(one, int) and isinstance(two, int):
            return one + two
        return self.builder.call(operator.add, one, two)
