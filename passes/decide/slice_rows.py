"""A slice along the tokens of K or V shows the same tokens of the rows they are made of.

Before::

    K = view(linear(c, W)); attention(q, K[:, :, :n], ...)

After::

    rows = c[:, :n]; K = view(linear(c, W)); attention(q, K[:, :, :n], ...)

Nothing reads ``rows`` yet, and nothing else changes: the linear map of ``K[:, :, :n]`` is that of K with these rows in
the place of c (:mod:`mla_compile.passes.linear.rows`). They are read where the attention is absorbed, and go away again
where it is not. Static caches are read like that: made from rows of full length, cut to the length in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.records import pieces_of
from mla_compile.passes.decide.sources import choose_sources
from mla_compile.passes.ir.graph import SHOWS, Builder, bytes_hint, shape, val
from mla_compile.passes.ir.operators import Told
from mla_compile.passes.ir.sizes import same, size
from mla_compile.passes.ir.walk import REACH
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, Shown
from mla_compile.passes.linear.rows import constant_along, rows_axis, slice_of
from mla_compile.passes.linear.rules import rule_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Taken:
    """A slice of K or V, or of what they are made of; ``rows``: what it is an image of, and which axis is sliced."""

    node: fx.Node
    rows: tuple[tuple[fx.Node, int], ...]


def slice_rows(sites: Iterable[AttentionSite], maps: Maps) -> Maps:
    """Adds the slices of rows that K and V of ``sites`` need, and returns the analysis that knows them."""
    shown: dict[fx.Node, tuple[Shown, ...]] = {}
    added: dict[tuple[object, ...], fx.Node] = {}
    operands = [[*(p.k.node for p in site.products), site.v.node] for site in sites]
    while True:  # a slice of a slice is found when the first one is known
        maps = maps.with_shown(shown)
        found = {t.node: t for nodes in operands for t in find_slices(nodes, maps)}
        new = {node: _add(found[node], added, maps) for node in sorted(found)}
        new = {node: rows for node, rows in new.items() if rows}
        if not new:
            return maps
        shown = {**shown, **new}


def find_slices(operands: Sequence[fx.Node], maps: Maps) -> list[Taken]:
    """The slices at which the walks from ``operands`` end although rows could be sliced instead."""
    slices = _ends(operands, maps)
    if not slices:
        return []
    others = [p for p in pieces_of([maps.map(node) for node in operands]) if p.source not in slices]
    cuts, _ = choose_sources([*pieces_of([maps.map(slice_of(s).x) for s in slices]), *others])
    at_cuts = maps.with_stops(cuts)
    taken = ((node, _rows(node, at_cuts.map(slice_of(node).x))) for node in slices)
    return [Taken(node, tuple(rows.items())) for node, rows in taken if rows]


def _ends(operands: Iterable[fx.Node], maps: Maps) -> list[fx.Node]:
    """The slices at which walks end, and those behind which the walk ended at something else.

    Columns split off from a slice of K are columns of a row tensor of its own, as long as the slice is taken for one.
    """
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    queue = list(operands)
    for node in queue:
        for end in {p.source: None for p in maps.map(node).pieces if p.source is not None}:
            if end in seen or len(seen) > REACH or end not in maps.reasons:
                continue
            seen.add(end)
            if end.target is aten.slice.Tensor and end not in maps.shown:
                found[end] = None
            queue += maps.operands(end) if rule_of(end) is not None else []
    return list(found)


def _rows(node: fx.Node, whole: LinearMap) -> dict[fx.Node, int] | None:
    """The rows that a slice of ``whole`` is an image of, and which axis of them is sliced; None where it is of none."""
    dim = slice_of(node).dim
    if whole.axis == dim:
        return None
    found: dict[fx.Node, int] = {}
    for piece in whole.pieces:
        own = piece.axes[dim]
        if constant_along(piece, own):
            continue
        at = rows_axis(piece, own)
        if piece.source is None or at is None or found.setdefault(piece.source, at) != at:
            return None
    return found if any(_narrower(p, node) for p in pieces_of([whole]) if p.source in found) else None


def _narrower(piece: Piece, node: fx.Node) -> bool:
    """Whether there is anything to be gained by rows in the place of ``node``: else it is as good a source."""
    assert piece.source is not None
    return piece.projected or bytes_hint(piece.source) < bytes_hint(slice_of(node).x)


def _add(taken: Taken, added: dict[tuple[object, ...], fx.Node], maps: Maps) -> tuple[Shown, ...]:
    """The slices of the rows of ``taken``, those that are there already used again; none where one is not certain."""
    node, how = taken.node, slice_of(taken.node)
    positions = _positions(node)
    values = tuple(p.meta["val"] if isinstance(p, fx.Node) else p for p in positions)
    if free_unbacked_symbols([val(node).shape[how.dim], *(v for v in values if v is not None)]):
        return ()  # a length read from data: two slices by it are two lengths
    builder = Builder(node, maps.fake_mode)
    shown: list[Shown] = []
    for rows, at in taken.rows:
        key = (rows, at, *(v if v is None else size(v) for v in values))
        if key not in added or not added[key] < node:
            added[key] = builder.call(aten.slice.Tensor, rows, at, *positions)
            added[key].meta[SHOWS] = True
        if not same(shape(added[key])[at], shape(node)[how.dim]):
            return ()
        shown.append(Shown(rows, at, added[key]))
    return tuple(shown)


def _positions(node: fx.Node) -> tuple[Told, Told, Told]:
    """Which positions a slice takes, as its operator wants to be told."""
    bounds = slice_of(node).bounds
    assert bounds is not None
    return bounds
