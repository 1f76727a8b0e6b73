"""Chooses the keys of a sparse attention among the rows of a paged cache.

Before, in a step of one token, where ``keys`` are the rows of a growing cache::

    scores = index_scores(query, keys, weights);  indices = topk(masked_fill(scores, hidden, -inf), min(k, T)).indices

After: each request chooses among its own ``seq_lens[b]`` rows::

    keys = pages[block_table];  scores = masked_fill(index_scores(query, keys, weights), arange(n) >= seq_lens, -inf)
    indices = topk(scores, min(k, n)).indices                          # n: the rows that a request's pages hold

A request with fewer than k rows gets all its rows, followed by positions past its end, which name no key. The rewrite
is correct if the model hides no row from the indexer: each ``hidden`` must be proved to be False everywhere. No other
operator may read the scores or the list, because the rewrite changes their sizes.

If ranks share the pages, each rank chooses k of its own rows, and gathers the choices and scores of all ranks. Among
these choices, every rank finds the same k best rows, and keeps the rows that it owns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from mla_compile.passes.attention.affine import OpaqueError, broadcast, never_negative, place_of
from mla_compile.passes.attention.masks import Masks
from mla_compile.passes.cache.exchange import Exchange
from mla_compile.passes.ir.axes import fresh_axes
from mla_compile.passes.ir.graph import Builder, args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Regroup
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, least_of, same

aten = torch.ops.aten
INDEX = torch.ops.mla_compile.index_scores
INDICES = 8
"""The position of the list of keys among the arguments of ``decode_attention``."""


@dataclass(frozen=True)
class PagedList:
    """A choice among the rows of one cache.

    Attributes:
        scores: the scores of all rows.
        between: the dtypes to which the scores are converted before they are compared.
        most: the number of rows that are chosen, unless the cache has fewer.
        indices: the tensors, int32 [B,1,k], that attentions read as their lists.
        region: every node from the scores to the indices. The rewrite replaces these nodes.
    """

    scores: fx.Node
    between: tuple[torch.dtype, ...]
    most: int
    indices: tuple[fx.Node, ...]
    region: frozenset[fx.Node]


def list_of(scores: fx.Node, rows: fx.Node) -> PagedList | str:
    """Return the choice that ``scores`` decide among the keys ``rows``, or why pages do not allow the choice."""
    query, keys, weights, *_ = args_of(scores)
    if keys is not rows or rows in (query, weights):
        return f"{scores.name} reads the rows {rows.name} as something else than keys"
    T = shape(scores)[-1]
    region, between, node = {scores}, [], scores
    while packet(node) is not aten.topk:
        readers = list(node.users)
        if len(readers) != 1:
            return f"the scores {node.name} are read by {len(readers)} operators"
        (reader,) = readers
        region.add(reader)
        if packet(reader) is aten.topk:
            node = reader
            continue
        if not _passes_on(reader, node) or not same(shape(reader)[-1], T):
            return f"{reader.name} ({packet(reader) or reader.op}) changes the scores {node.name}"
        if val(reader).dtype != val(node).dtype:
            between.append(val(reader).dtype)
        node = reader
    most = _most(node, T)
    if most is None:
        return f"{node.name} chooses no fixed number of rows along the last axis"
    indices: list[fx.Node] = []
    for found in node.users:
        region.add(found)
        if found.target is not operator.getitem or found.args[1] != 1:
            if found.users:
                return f"{found.name} reads the scores that are chosen"
        elif (other := _lead_to_attention(found, region, indices)) is not None:
            return f"{other.name} ({packet(other) or other.op}) reads the list {found.name}"
    return PagedList(scores, tuple(between), most, tuple(indices), frozenset(region))


def _passes_on(node: fx.Node, scores: fx.Node) -> bool:
    """Whether ``node`` has the values of ``scores``, perhaps in another dtype or shape, and hides no value."""
    how = decode(node)
    if isinstance(how, Regroup):
        return how.x is scores
    if isinstance(how, Copy):
        return how.x is scores and val(node).dtype.is_floating_point
    if packet(node) is not aten.masked_fill or argument(node, 0, "self") is not scores:
        return False
    condition = argument(node, 1, "mask")
    place = broadcast(shape(condition), place_of(fresh_axes(shape(node))))
    try:
        parts = Masks().parts(condition, place, negated=True)
    except OpaqueError:
        return False
    return all(part.bound is not None and never_negative(part.bound) for part in parts)


def _most(top: fx.Node, T: Size) -> int | None:
    """Return ``k`` if ``top`` takes the ``min(k, T)`` greatest along the last axis; None otherwise."""
    x = argument(top, 0, "self")
    if axis(argument(top, 2, "dim", -1), len(shape(x))) != len(shape(x)) - 1 or not argument(top, 3, "largest", True):
        return None
    k = next((shape(n)[-1] for n in top.users), None)
    counts = [n for n in least_of(k) if not same(n, T)] if k is not None else []
    return int(counts[0]) if len(counts) == 1 and sympy.sympify(counts[0]).is_Integer else None


def _lead_to_attention(node: fx.Node, region: set[fx.Node], found: list[fx.Node]) -> fx.Node | None:
    """Collect in ``found`` the nodes that attentions read as their index list.

    Return a reader that uses ``node`` in any other way, if there is one.
    """
    for reader in node.users:
        if packet(reader) is torch.ops.mla_compile.decode_attention:
            if argument(reader, INDICES, "indices") is not node:
                return reader
            if node not in found:
                found.append(node)
            continue
        how = decode(reader)
        whole = isinstance(how, (Copy, Regroup)) and val(reader).dtype in (torch.int32, torch.int64)
        if not whole:
            return reader
        region.add(reader)
        if (other := _lead_to_attention(reader, region, found)) is not None:
            return other
    return None


def made_anew(lists: Iterable[PagedList]) -> set[fx.Node]:
    """Return the nodes that are no longer needed once the lists are made over pages."""
    lists = list(lists)
    gone = {node for one in lists for node in one.region}
    kept = {n for one in lists for n in (args_of(one.scores)[0], args_of(one.scores)[2])}
    nodes: list[fx.Node] = list(next(iter(gone)).graph.nodes) if gone else []
    for node in reversed(nodes):
        if node.users and node not in kept and all(user in gone for user in node.users):
            gone.add(node)
    return gone


def choose_over_pages(
    one: PagedList,
    pages: fx.Node,
    table: fx.Node,
    lengths: fx.Node,
    builder: Builder,
    ranks: Exchange | None = None,
) -> None:
    """Make the list of each request from its own rows.

    ``pages`` are [P,page,D], ``table`` is [B,M], and ``lengths`` [B] include the new row. With ``ranks``, all of these
    describe only this rank's rows.
    """
    query, _, weights, *scale = args_of(one.scores)

    def best(
        q: torch.Tensor, w: torch.Tensor, pool: torch.Tensor, of: torch.Tensor, n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Past a request's end, the table may hold -1. Any page may be read there, because those scores are hidden.
        keys = pool[of.clamp(min=0).long()].flatten(1, 2)
        scores: torch.Tensor = INDEX.default(q, keys, w, *scale, **one.scores.kwargs)
        for dtype in one.between:
            scores = scores.to(dtype)
        hidden = torch.arange(keys.shape[1], device=n.device) >= n[:, None, None]
        chosen = scores.masked_fill(hidden, -torch.inf).topk(torch.sym_min(one.most, keys.shape[1]), dim=-1)
        return chosen.values, chosen.indices.to(torch.int32)

    scores, made = builder.trace_all(best, [query, weights, pages, table, lengths])
    if ranks is not None:
        made = _of_all_ranks(one, scores, made, builder, ranks)
    for node in one.indices:
        node.replace_all_uses_with(made)


def _of_all_ranks(one: PagedList, scores: fx.Node, own: fx.Node, builder: Builder, ranks: Exchange) -> fx.Node:
    """Return this rank's rows among the best rows of all ranks, with -1 in place of other ranks' rows."""
    sharing = ranks.sharing
    scores, own = ranks.gathered(scores), ranks.gathered(own)

    def mine(scores_CBSk: torch.Tensor, own_CBSk: torch.Tensor) -> torch.Tensor:
        rank = torch.arange(sharing.size, dtype=torch.int32, device=own_CBSk.device).reshape(-1, 1, 1, 1)
        places = (own_CBSk * sharing.size + rank).permute(1, 2, 0, 3).flatten(2)
        found = scores_CBSk.permute(1, 2, 0, 3).flatten(2)
        best = found.topk(torch.sym_min(one.most, found.shape[2]), dim=-1).indices
        chosen = places.gather(2, best)
        return torch.where(chosen % sharing.size == sharing.rank, chosen // sharing.size, -1)

    return builder.trace(mine, [scores, own])
