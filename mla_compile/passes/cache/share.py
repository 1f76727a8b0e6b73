"""Rewrite caches that are shared by ranks: each rank writes only its own new rows, and attends only to its own rows.

Before: ``joined = cat([past, new], dim)``, kept by the caller, and ``decode_attention(q, joined, ...)``.
After: ``own = slice_scatter(past', where(mine, new, old), dim, ...)``. The tensor ``past'`` holds this rank's rows and
has spare capacity. :mod:`mla_compile.passes.cache.share_attention` replaces the attention.

A buffer of full length is rewritten in the same way, with positions that are known only at run time::

    rows = index_copy(buffer, dim, at, new)
      ->  own = index_copy(buffer', dim, at // C, where(at % C == rank, new, old))

Rows are distributed round robin (:class:`mla_compile.core.sharing.Sharing`). All ranks have the same graph and write
equally many rows. In place of another rank's token, a rank writes back an old value or repeats one of its own tokens.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.core.program import Append, Program
from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.append import begun_buffers, joined_rows, token_major, write_in_place
from mla_compile.passes.cache.share_attention import OwnRows, attend, number, readers
from mla_compile.passes.ir.graph import Builder, packet, shape, val, whole_rows
from mla_compile.passes.ir.moves import Copy, Join, Reorder
from mla_compile.passes.ir.operators import behind
from mla_compile.passes.ir.sizes import Size, same, size
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.sources.writes import rows_written

aten = torch.ops.aten


def share_rows(program: Program) -> str | None:
    """Rewrite a program to read and write only this rank's share of the rows.

    Return None on success, or the reason why the program needs all rows. The rewritten caches are added to
    ``program.appends``.
    """
    sharing, graph = program.capture.sharing, program.gm.graph
    assert sharing is not None
    if program.cache is not None or program.capture.latents:
        return "the program also keeps K and V of each head"
    joins = {how.parts[0].name: (at, how) for at, how in joined_rows(program) if len(how.parts) == 2}
    found: list[_JoinedCache | str] = []
    for past in (node for node in program.placeholders if node.name in program.capture.shared):
        if past.name in program.mutations:
            found.append(_JoinedCache.written(program, past))
        elif past.name in joins:
            found.append(_JoinedCache.grown(program, *joins[past.name]))
        else:
            found.append(f"{past.name} is used for more than a join with new rows")
    for cache in found:
        if isinstance(cache, str):
            return cache
    caches = [cache for cache in found if isinstance(cache, _JoinedCache)]
    for cache in caches:
        _plain_sizes(graph, cache)
    remove_dead_code(graph)
    attentions: dict[fx.Node, None] = {}
    dims = {cache.joined: cache.dim for cache in caches}
    for cache in caches:
        uses = readers(cache.joined, dims, sharing)
        if isinstance(uses, str):
            return uses
        attentions |= dict.fromkeys(uses)
    writer = _RankWriter(program, sharing)
    own = {cache.joined: writer.write(cache) for cache in caches}
    for node in [n for n in graph.nodes if n in attentions]:
        attend(node, own, sharing, program.fake_mode)
    _return(program, caches, own)
    remove_dead_code(graph)
    return None


def begun_rows(program: Program, verdicts: Iterable[Verdict]) -> set[fx.Node]:
    """Return the caches that begin in a program and are worth sharing, because all their attentions can be split."""
    if program.cache is not None or program.capture.latents:
        return set()
    before = len(program.mutations)
    begun = {program.outputs[before + at]: how.parts[0] for at, how in joined_rows(program) if len(how.parts) == 1}
    buffers = (program.outputs[before + at] for at, _ in begun_buffers(program))
    begun |= {buffer: buffer for buffer in buffers}
    made_of = {joined: {joined, *behind(part, (Copy, Reorder))} for joined, part in begun.items()}
    known = set[fx.Node]().union(*made_of.values())
    good, bad = set[fx.Node](), set[fx.Node]()
    for verdict in verdicts:
        plan = verdict.plan
        if plan is None:
            continue
        rows = {whole_rows(row.node, picked=False) for row in plan.rows}
        # An attention that also reads other rows, or joins rows of several sources, would need all rows of each cache.
        joined = any(r is not None and r.parts for r in (plan.latent, plan.rope, plan.values))
        fits = plan.whole and plan.visible.chosen is None and not plan.visible.alike and rows <= known and not joined
        (good if fits else bad).update(rows)
    return {joined for joined, nodes in made_of.items() if nodes & good and not nodes & bad}


def grown_rows(program: Program) -> set[fx.Node]:
    """Return the caches that a program continues and whose rows the ranks share."""
    before, joined = len(program.mutations), joined_rows(program)
    return {program.outputs[before + at] for at, how in joined if how.parts[0].name in program.capture.shared}


@dataclass(frozen=True)
class _JoinedCache:
    """The cache ``joined``: ``before`` old rows ``past``, then ``count`` rows ``new``. It is returned at place ``at``.

    If ``positions`` is set, the cache is a buffer of ``before`` rows. The rows ``new`` are written at these positions.
    """

    joined: fx.Node
    past: fx.Node
    new: fx.Node
    dim: int
    before: int | fx.Node
    at: int | None = None
    count: int = 0
    positions: fx.Node | None = None

    @classmethod
    def grown(cls, program: Program, at: int, how: Join) -> _JoinedCache | str:
        (past, new), joined = how.parts, program.outputs[len(program.mutations) + at]
        count, before = shape(new)[how.dim], shape(past)[how.dim]
        if not isinstance(count, int):
            return "the number of new rows is symbolic"
        if len(past.users) > 1 or past.name in program.mutations:
            return f"{past.name} is used for more than a join with new rows"
        if not same(shape(joined)[how.dim], before + count) or val(joined).dtype != val(past).dtype:
            return f"{past.name} is converted"
        number = _number(program, before)
        if number is None:
            return f"no input holds the length of {past.name}"
        return cls(joined, past, new, how.dim, number, at, count)

    @classmethod
    def written(cls, program: Program, past: fx.Node) -> _JoinedCache | str:
        joined = program.outputs[program.mutations.index(past.name)]
        how = rows_written(joined)
        if how is None or how.base is not past or len(past.users) > 1:
            return f"{past.name} is used for more than writes at positions of its tokens"
        if program.outputs.count(joined) > 1 or past.name in program.aliases.values():
            return f"{past.name} is returned"
        number = _number(program, shape(past)[how.dim])
        if number is None:
            return f"no input holds the length of {past.name}"
        return cls(joined, past, how.x, how.dim, number, positions=how.index)


def _number(program: Program, wanted: Size) -> int | fx.Node | None:
    """Return ``wanted`` if it is a number, or else the input that holds this symbolic size; None if no input does."""
    if isinstance(wanted, int):
        return wanted
    symbolic = (n for n in program.placeholders if isinstance(n.meta["val"], torch.SymInt))
    return next((n for n in symbolic if same(size(n.meta["val"]), wanted)), None)


def _plain_sizes(graph: fx.Graph, cache: _JoinedCache) -> None:
    """Compute the total number of rows as ``before + count`` instead of reading it from a tensor's shape."""
    total = shape(cache.joined)[cache.dim]
    if isinstance(cache.before, int):
        return  # no size is symbolic
    for node in graph.nodes:
        if packet(node) is aten.sym_size and same(size(node.meta["val"]), total):
            with graph.inserting_before(node):
                sum_of = graph.call_function(operator.add, (cache.before, cache.count))
            sum_of.meta = dict(node.meta)
            node.replace_all_uses_with(sum_of)


class _RankWriter:
    """Writes new rows into this rank's rows. Writes at equal positions share nodes."""

    def __init__(self, program: Program, sharing: Sharing) -> None:
        self.program = program
        self.sharing = sharing
        self._places: dict[object, tuple[fx.Node | int, fx.Node | int, fx.Node | int, fx.Node]] = {}
        self._rows: dict[object, tuple[fx.Node, fx.Node, fx.Node | None]] = {}

    def write(self, cache: _JoinedCache) -> OwnRows:
        """Write the new rows of ``cache``. Return this rank's rows and the new total number of tokens."""
        joined, dim = cache.joined, cache.dim
        builder = Builder(joined, self.program.fake_mode)
        call = builder.call
        rows = list(val(joined).shape)
        rows[dim] = self.sharing.capacity(rows[dim])
        past = val(cache.past)
        with self.program.fake_mode or contextlib.nullcontext():
            if cache.positions is None:
                cache.past.meta["val"] = past.new_empty_strided(tuple(rows), token_major(rows, dim))
            else:  # dense, as the result is, so that a compiler inserts no copy
                cache.past.meta["val"] = past.new_empty(tuple(rows))
        new, axes = cache.new, [1] * (val(joined).dim() - dim - 1)
        if cache.positions is not None:
            place, mine, chosen = self._rows_of(cache, cache.positions)
            new = new if chosen is None else call(aten.index_select.default, new, dim, chosen)
            old = call(aten.index_select.default, cache.past, dim, place)
            kept = call(aten.where.self, call(aten.reshape.default, mine, [-1, *axes]), new, old)
            return OwnRows(call(aten.index_copy.default, cache.past, dim, place, kept), dim, cache.before)
        first, end, total, place = self._place(cache)
        mine = call(aten.logical_and.default, call(aten.ge.Scalar, place, 0), call(aten.lt.Scalar, place, cache.count))
        if cache.count > 1:
            new = call(aten.index_select.default, new, dim, call(aten.clamp.default, place, 0, cache.count - 1))
        old = call(aten.slice.Tensor, cache.past, dim, first, end)
        kept = call(aten.where.self, call(aten.reshape.default, mine, [-1, *axes]), new, old)
        own = call(aten.slice_scatter.default, cache.past, kept, dim, first, end)
        return OwnRows(own, dim, total)

    def _place(self, cache: _JoinedCache) -> tuple[fx.Node | int, fx.Node | int, fx.Node | int, fx.Node]:
        """Return the first row and the end of the range to write, the total number of tokens, and each row's token.

        A row's token is given as an index among the new tokens. If the index is out of range, the row keeps its old
        value.
        """
        key = cache.before, cache.count, val(cache.joined).device
        if key not in self._places:
            builder = Builder(self._first(), self.program.fake_mode)
            ranks, rank = self.sharing.size, self.sharing.rank
            first = number(builder, operator.floordiv, cache.before, ranks)
            total = number(builder, operator.add, cache.before, cache.count)
            last = number(builder, operator.floordiv, number(builder, operator.sub, total, 1), ranks)
            end = number(builder, operator.add, first if cache.count == 1 else last, 1)
            count = 1 if cache.count == 1 else number(builder, operator.sub, end, first)
            ahead = number(builder, operator.sub, number(builder, operator.mul, first, ranks), cache.before)
            place = builder.call(aten.arange.default, count, device=val(cache.joined).device)
            place = builder.call(aten.mul.Tensor, place, ranks)
            place = builder.call(aten.add.Tensor, place, number(builder, operator.add, ahead, rank))
            self._places[key] = first, end, total, place
        return self._places[key]

    def _rows_of(self, cache: _JoinedCache, positions: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Return, for each of ``positions``, the row to write, whether this rank owns the row, and the token to write.

        The token is an index among the new tokens. For a single token, None is returned instead. Tokens of two ranks
        may have the same row number, and the order of two writes to one row is undefined. A rank that owns a token
        therefore writes this token again in place of each token that it does not own.
        """
        by_number = packet(cache.joined) is aten.index_put
        key = positions, cache.before, by_number
        if key not in self._rows:
            after = positions.next if positions.op == "call_function" else self._first()
            builder, ranks = Builder(after, self.program.fake_mode), self.sharing.size
            call, at = builder.call, builder.cast(positions, torch.int64)
            if by_number:  # negative positions count from the end
                at = call(aten.where.self, call(aten.lt.Scalar, at, 0), call(aten.add.Tensor, at, cache.before), at)
            # A position outside the buffer must stay outside on every rank.
            there = call(aten.logical_and.default, call(aten.ge.Scalar, at, 0), call(aten.lt.Scalar, at, cache.before))
            rows = call(aten.where.self, there, call(aten.div.Tensor_mode, at, ranks, rounding_mode="floor"), at)
            mine = call(aten.eq.Scalar, call(aten.remainder.Scalar, at, ranks), self.sharing.rank)
            mine = call(aten.logical_or.default, mine, call(aten.logical_not.default, there))
            chosen = None
            if not same(shape(positions)[0], 1):
                own = call(aten.argmax.default, builder.cast(mine, torch.int32))
                every = call(aten.arange.default, builder.size(positions, 0), device=val(positions).device)
                chosen = call(aten.where.self, mine, every, own)
                rows, mine = (call(aten.index_select.default, x, 0, chosen) for x in (rows, mine))
            self._rows[key] = rows, mine, chosen
        return self._rows[key]

    def _first(self) -> fx.Node:
        """Return the first node that is not an input. Nodes inserted before this node can be read everywhere."""
        nodes: Iterable[fx.Node] = self.program.gm.graph.nodes
        return next(n for n in nodes if n.op not in ("placeholder", "get_attr"))


def _return(program: Program, caches: list[_JoinedCache], own: dict[fx.Node, OwnRows]) -> None:
    """Write this rank's rows in place instead of returning them."""
    grown: dict[int, tuple[str, fx.Node]] = {}
    for cache in caches:
        rows = own[cache.joined].node
        if cache.at is None:
            cache.joined.replace_all_uses_with(rows)
        else:
            grown[cache.at] = cache.past.name, rows
    write_in_place(program, grown)
    program.appends += tuple(
        Append(cache.past.name, cache.at, cache.dim, cache.count, shared=True, grows=cache.at is not None)
        for cache in caches
    )
