"""Treat a slice of K or V along the tokens as an image of the corresponding slice of the rows.

In ``K = view(linear(c, W)); attention(q, K[:, :, :n], ...)``, the linear map of ``K[:, :, :n]`` is the map of K with
``c[:, :n]`` in place of c (:mod:`mla_compile.passes.linear.rows`). The slice ``c[:, :n]`` is a *virtual source*: it is
added to the graph only if an attention that reads it is absorbed. Models with static caches slice K like this. They
expand rows of full length to K, and then cut K to the length in use.

Three other operators can also be applied to rows instead of K or V. A pad adds zero tokens: ``pad(c W) = pad(c) W``. An
index picks tokens: ``(c W)[:, at] = c[:, at] W``. A product multiplies each token by a factor:
``(c W) g = (c g) W``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.ir.graph import args_of, bytes_hint, decides, is_virtual, packet, shape, val, virtual
from mla_compile.passes.ir.moves import Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same, size
from mla_compile.passes.ir.walk import REACH, depends_on
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, RowGate, RowSlice
from mla_compile.passes.linear.rows import (
    Gated,
    Taken,
    constant_along,
    gate_along,
    gated_of,
    may_be_taken,
    pad_along,
    pick,
    position_axis,
    rows_axis,
    taken_of,
)
from mla_compile.passes.sources.records import pieces_of
from mla_compile.passes.sources.sources import choose_sources

aten = torch.ops.aten
_Row = TypeVar("_Row", RowSlice, RowGate)


@dataclass(frozen=True)
class Sliced:
    """A slice of K or V, or of a tensor upstream of K or V.

    ``rows``: the row tensors to slice instead, each with the axis to slice. A pad with zeros is a slice that takes more
    rows than exist.
    """

    node: fx.Node
    rows: tuple[tuple[fx.Node, int], ...]


@dataclass(frozen=True)
class GatedRows:
    """A product with one factor per row.

    ``rows``: the row tensors to multiply instead, each with a tuple. For each axis of the row tensor, the tuple holds
    the corresponding axis of the factors or None.
    """

    node: fx.Node
    rows: tuple[tuple[fx.Node, tuple[int | None, ...]], ...]


def with_row_slices(sites: Iterable[AttentionSite], maps: Maps) -> Maps:
    """Add to ``maps`` the sliced rows, and the rows with factors, that lie upstream of K and V of ``sites``."""
    return with_slices_of([[*(p.k.node for p in site.products), site.v.node] for site in sites], maps)


def with_slices_of(operands: Sequence[Sequence[fx.Node]], maps: Maps) -> Maps:
    """Do what :func:`with_row_slices` does, for groups of arbitrary tensors. Each group is analysed as a whole."""
    known: dict[tuple[object, ...], fx.Node] = {}
    while True:  # each round finds slices of already known slices
        found = {t.node: t for nodes in operands for t in find_slices(nodes, maps)}
        in_order = [found[node] for node in sorted(found)]
        gated = {one.node: _row_gates(one, maps) for one in in_order if isinstance(one, GatedRows)}
        new = {one.node: _row_slices(one, known, maps) for one in in_order if isinstance(one, Sliced)}
        new = {node: rows for node, rows in new.items() if rows}
        if not new and not gated:
            return maps
        slices = {**_not_made_by(gated, maps.virtual.slices), **_not_made_by(gated, new)}
        gates = {**_not_made_by(gated, maps.virtual.gates), **gated}
        maps = maps.with_virtual(replace(maps.virtual, slices=slices, gates=gates))


def _not_made_by(gated: Collection[fx.Node], known: Mapping[fx.Node, Sequence[_Row]]) -> dict[fx.Node, Sequence[_Row]]:
    """Remove the entries of ``known`` whose rows depend on ``gated``, because ``gated`` has narrower rows upstream."""
    return {node: rows for node, rows in known.items() if not any(_made_by(gated, r.rows) for r in rows)}


def _made_by(gated: Collection[fx.Node], node: fx.Node) -> bool:
    return bool(gated) and (node in gated or depends_on(node, gated))


def find_slices(operands: Sequence[fx.Node], maps: Maps) -> list[Sliced | GatedRows]:
    """Return the slices and products that end walks from ``operands`` and can be applied to rows instead."""
    slices = _ends(operands, maps)
    # A walk past a weight that all groups share sees the groups as columns. So walks that end at the chosen sources are
    # searched, too.
    if maps.virtual.grouped:
        cuts, _ = choose_sources(pieces_of([maps.map(node) for node in operands]))
        slices |= _ends(operands, maps.with_sources(cuts))
    if not slices:
        return []
    others = [p for p in pieces_of([maps.map(node) for node in operands]) if p.source not in slices]
    # Sources that were chosen for K and V together may be as wide as K or V alone, so any width is allowed.
    taken_from = pieces_of([maps.map(taken.x) for taken in slices.values()])
    cuts, _ = choose_sources([*taken_from, *others], any_width=bool(maps.sources))
    at_cuts = maps.with_sources(cuts)
    found: list[Sliced | GatedRows] = []
    for node, taken in slices.items():
        whole = at_cuts.map(taken.x)
        if isinstance(taken, Gated):
            gated = _rows_gated(taken, whole)
            found += [GatedRows(node, tuple(gated.items()))] if gated else []
        else:
            rows = _rows(taken, whole)
            found += [Sliced(node, tuple(rows.items()))] if rows else []
    return found


def _ends(operands: Iterable[fx.Node], maps: Maps) -> dict[fx.Node, Taken | Gated]:
    """Return the slices and the products with factors that lie at the end of a walk, or upstream of that end.

    For example, a walk may end at columns that are split off from a slice. The slice then lies upstream of this end.
    """
    found: dict[fx.Node, Taken | Gated] = {}
    seen: set[fx.Node] = set()
    queue = list(operands)
    for node in queue:
        for end in {p.source: None for p in maps.map(node).pieces if p.source is not None}:
            if end in seen or len(seen) > REACH or end not in maps.reasons:
                continue
            seen.add(end)
            known = end in maps.virtual.slices or end in maps.virtual.gates
            taken = None if known else _taken(end) or gated_of(maps, end)
            if taken is not None:
                found[end] = taken
            behind = args_of(end)[0] if is_virtual(end) else end  # a virtual node is computed from its first argument
            queue += maps.operands(behind) if maps.follows(behind) else []
    return found


def _taken(node: fx.Node) -> Taken | None:
    # The result of a split has no bounds, but a slice of rows needs bounds.
    how = decode(node)
    return None if isinstance(how, Slice) and how.bounds is None else taken_of(node)


def _rows(taken: Taken, whole: LinearMap) -> dict[fx.Node, int] | None:
    """Return the row tensors that can be sliced instead, each with the axis to slice.

    Return None if there are none or if slicing rows saves nothing. ``whole``: the map of the tensor that is sliced now.
    """
    dim = taken.dim
    # If tensors are joined along the sliced axis, the bounds decide at run time which tensors the slice reads.
    if whole.axis == dim:
        return None
    found: dict[fx.Node, int] = {}
    for piece in whole.pieces:
        own = piece.axes[dim]
        if not may_be_taken(piece, own, taken):
            return None
        # A constant (zeros, a bias) has no row to slice.
        if constant_along(piece, own):
            continue
        at = rows_axis(piece, own) if taken.index is None else position_axis(piece, own)
        if piece.source is None or at is None or found.setdefault(piece.source, at) != at:
            return None
    return found if any(_narrower(p, taken) for p in pieces_of([whole]) if p.source in found) else None


def _one_position(rows: fx.Node, at: int, taken: Taken, maps: Maps) -> fx.Node | None:
    """Return the slice of ``rows`` that makes the selected position of ``taken.x``.

    The slice is one position of axis ``at`` if this axis is as long as the selected axis. Otherwise, the slice is a
    range of positions. Return None if the two lengths differ and either is symbolic.
    """
    assert taken.index is not None
    count, length = shape(taken.x)[taken.dim], shape(rows)[at]
    if same(count, length):
        return virtual(maps.fake_mode, aten.select.int, rows, at, taken.index)
    if not isinstance(count, int) or not isinstance(length, int):
        return None
    width = length // count
    return virtual(maps.fake_mode, aten.slice.Tensor, rows, at, taken.index * width, (taken.index + 1) * width)


def _rows_gated(gated: Gated, whole: LinearMap) -> dict[fx.Node, tuple[int | None, ...]] | None:
    """Return the row tensors that can be multiplied instead; None if there are none or if this saves nothing.

    The tuple of a row tensor holds, for each axis, the corresponding axis of the gate or None.
    """
    if any(p.source is None or gate_along(p, gated.gate) is None for p in whole.pieces):
        return None
    # The rows are multiplied in each call, so they have to be narrower than the tensor that is multiplied now.
    if any(bytes_hint(p.source) >= bytes_hint(gated.x) for p in whole.pieces if p.source is not None):
        return None
    # A factor that is computed from the expanded rows, such as the factor of a norm, needs the expansion anyway.
    made = {v.node for p in whole.pieces for v in p.path if v.contractions == p.path[-1].contractions}
    if gated.gate in made or depends_on(gated.gate, made):
        return None
    # If rows are computed from the factor, the factor is the scale of quantized rows. Other code handles these rows.
    if any(p.source is not None and depends_on(p.source, [gated.gate]) for p in whole.pieces):
        return None
    found: dict[fx.Node, tuple[int | None, ...]] = {}
    for p in whole.pieces:
        along = gate_along(p, gated.gate)
        if p.source is None or along is None or found.setdefault(p.source, tuple(along)) != tuple(along):
            return None
    return found


def _row_gates(gated: GatedRows, maps: Maps) -> tuple[RowGate, ...]:
    """Return the row tensors of ``gated``, multiplied or divided by the factors."""
    how = gated_of(maps, gated.node)
    assert how is not None
    found: list[RowGate] = []
    for rows, along in gated.rows:
        gate = how.gate
        # The gate gets the layout of the rows, with size 1 along each axis on which the factor does not depend.
        if ones := [k for k in range(len(shape(gate))) if k not in along]:
            gate = virtual(maps.fake_mode, aten.squeeze.dims, gate, ones)
        kept = [k for k in along if k is not None]
        if kept != sorted(kept):
            gate = virtual(maps.fake_mode, aten.permute.default, gate, [sorted(kept).index(k) for k in kept])
        for dim, k in enumerate(along):
            gate = gate if k is not None else virtual(maps.fake_mode, aten.unsqueeze.default, gate, dim)
        target = gated.node.target
        assert callable(target)
        decided_by = (*decides(rows), *decides(gate))
        found.append(RowGate(rows, virtual(maps.fake_mode, target, rows, gate, decided_by=decided_by)))
    return tuple(found)


def _narrower(piece: Piece, taken: Taken) -> bool:
    """Whether slicing the rows gains anything; if not, the slice itself is used as the source."""
    assert piece.source is not None
    return piece.projected or bytes_hint(piece.source) < bytes_hint(taken.x)


def _row_slices(sliced: Sliced, known: dict[tuple[object, ...], fx.Node], maps: Maps) -> tuple[RowSlice, ...]:
    """Return a slice of each row tensor of ``sliced``; ``known`` slices are reused.

    Return () if a slice of rows might not match the slice of K or V.
    """
    node, taken = sliced.node, _taken(sliced.node)
    assert taken is not None
    how = decode(node)
    positions = how.bounds if isinstance(how, Slice) else ()
    assert positions is not None
    values = tuple(p.meta["val"] if isinstance(p, fx.Node) else p for p in positions)
    length = [] if taken.index is not None else [val(node).shape[taken.dim]]
    if free_unbacked_symbols([*length, *(v for v in values if v is not None)]):
        return ()  # the size is unbacked, so each slice would get a fresh symbol
    found: list[RowSlice] = []
    for rows, at in sliced.rows:
        bounds = (v if v is None else size(v) for v in values)
        key = (rows, at, taken.padded, taken.index, taken.at, taken.at and packet(node), *bounds)
        # A known slice is not reused if its bounds are computed after `node`, because an attention may need it earlier.
        if key not in known or any(read > node for read in known[key].all_input_nodes):
            if taken.index is not None:
                one = _one_position(rows, at, taken, maps)
                if one is None:
                    return ()
                known[key] = one
            elif taken.at is not None:
                known[key] = pick(partial(virtual, maps.fake_mode), node, rows, at)
            elif taken.padded is None:
                known[key] = virtual(maps.fake_mode, aten.slice.Tensor, rows, at, *positions)
            else:
                widths = pad_along(len(shape(rows)), at, taken.padded)
                known[key] = virtual(maps.fake_mode, aten.constant_pad_nd.default, rows, widths)
        # If K and the rows have different lengths, equal bounds may be clamped differently.
        if taken.index is None and not same(shape(known[key])[at], shape(node)[taken.dim]):
            return ()
        found.append(RowSlice(rows, at, known[key]))
    return tuple(found)
