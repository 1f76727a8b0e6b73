"""Joins maps of one source into one map by concatenating their weights.

Heads that are projected one by one (a ModuleList, a stack, a cat that is later viewed as heads) read the same rows:
``[W_1 z, W_2 z] = [W_1, W_2] z``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, Axis, axis_size, common_factors, fixed_size, fresh_axis
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.factors import aligned, scaled
from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.linear.records import LinearMap, Piece, Segment, Visit

aten = torch.ops.aten


def one_map(source: LinearMap, node: fx.Node) -> LinearMap | None:
    """Return ``source`` as a single map; None unless all segments have a weight and the same source."""
    if source.axis is None:
        return source
    piece = side_by_side(source.segments, source.axis, node)
    return None if piece is None else LinearMap.single(piece)


def side_by_side(segments: Sequence[Segment], dim: int, node: fx.Node) -> Piece | None:
    """Join segments along ``dim`` into one piece. Return None unless all have a weight and the same source."""
    first = segments[0].piece
    if first.source is None or first.weight is None or first.added:
        return None
    pieces: list[Piece] = []
    for segment in segments:
        piece = _like(first, segment.piece, dim)
        if piece is None:
            return None
        pieces.append(piece)
    # A new atom is needed, because heads of separate weights were not factors of one axis before.
    into = Atom(segments[-1].stop - segments[0].start)
    widths = [s.stop - s.start for s in segments]
    weight = _joined([p.weight for p in pieces], [p.axes[dim] for p in pieces], widths, into)
    assert weight is not None
    bias = _joined([p.bias for p in pieces], [p.axes[dim] for p in pieces], widths, into)
    axes = tuple((into,) if k == dim else a for k, a in enumerate(first.axes))
    path = _common_path(pieces, node)
    return replace(first, axes=axes, weight=weight, bias=bias, scale=1.0, path=path, dtype=val(node).dtype)


def stacked(elements: Sequence[LinearMap], dim: int, node: fx.Node) -> LinearMap | None:
    """Join heads that were made one by one along ``dim``. Return None if the heads have different rows.

    Axis ``dim`` has size 1 in each element. Each segment of the result joins the weights of the heads, or repeats rows
    that all heads share (a rotary key).
    """
    first = elements[0]
    # Elements cannot be joined if they have segments along the stacked axis, or along different axes.
    if first.axis == dim or any(e.axis != first.axis for e in elements):
        return None
    joined: list[Segment] = []
    for segments in zip(*(e.segments for e in elements), strict=False):
        if len({(s.start, s.stop) for s in segments}) > 1:
            return None
        pieces = [s.piece for s in segments]
        piece = side_by_side([Segment(k, k + 1, p) for k, p in enumerate(pieces)], dim, node)
        piece = _repeated(pieces, dim, node) if piece is None else piece
        if piece is None:
            return None
        joined.append(replace(segments[0], piece=piece))
    return LinearMap(tuple(joined), first.axis)


def _repeated(pieces: Sequence[Piece], dim: int, node: fx.Node) -> Piece | None:
    """Return equal pieces (the same rows, or zeros) as one piece repeated along ``dim``; None if pieces differ."""
    first = pieces[0]
    if first.weight is not None or first.bias is not None or first.added:
        return None
    if first.source is None:  # zeros have no rows, so their axes need not match
        pieces = [replace(p, axes=first.axes) for p in pieces]
    if any(replace(p, path=first.path) != first for p in pieces):
        return None
    axes = tuple(fresh_axis(len(pieces)) if k == dim else a for k, a in enumerate(first.axes))
    shared = set.intersection(*({v.node for v in p.path} for p in pieces))
    path = tuple(v for v in first.path if v.node in shared)
    return replace(first, axes=axes, path=path, dtype=val(node).dtype).visited(node)


def joint_of(source: LinearMap) -> fx.Node | None:
    """Return the tensor in which the segments are joined: the first node that lies on the paths of all segments.

    Return None if all segments are projected, or if there is no such node.
    """
    if source.axis is None or all(p.projected for p in source.pieces):
        return None
    # A source is on the path of its own piece, but nothing is joined at a source.
    common = set.intersection(*({v.node for v in p.path} for p in source.pieces)) - {p.source for p in source.pieces}
    return next((v.node for v in source.pieces[0].path if v.node in common), None)


def _like(first: Piece, piece: Piece, dim: int) -> Piece | None:
    """Write ``piece`` in the atoms of ``first``, except along ``dim``, and multiply the weight by the scale.

    Return None if this is impossible.
    """
    if piece.source is not first.source or piece.source_axes != first.source_axes or piece.weight is None:
        return None
    if piece.added:
        return None
    tokens = first.source_atoms
    # Joining along tokens would give more rows, not more columns.
    if any(a in tokens for a in piece.axes[dim]):
        return None
    rename: dict[Atom, Atom] = {}
    for k, (own, other) in enumerate(zip(first.axes, piece.axes, strict=True)):
        if k == dim or own == other:
            continue
        # Tokens must be identical atoms. Features and broadcast axes have different atoms in each piece, and only their
        # factors must match.
        splits = None if tokens & {*own, *other} else common_factors(own, other)
        # `first` cannot be split now, because earlier pieces already use its atoms.
        if splits is None or splits[0]:
            return None
        piece = piece.split(splits[1])
        rename |= zip(piece.axes[k], own, strict=True)
    assert piece.weight is not None
    weight = scaled(piece.weight, piece.scale).renamed(rename)
    return replace(piece, weight=weight, bias=piece.bias and piece.bias.renamed(rename), scale=1.0)


def _joined(factors: Sequence[Factor | None], own: Sequence[Axis], widths: Sequence[int], into: Atom) -> Factor | None:
    """Concatenate the factors along their axes ``own``, with zeros for missing factors."""
    known = [f for f in factors if f is not None]
    if not known:
        return None
    rest = tuple(dict.fromkeys(a for f, axis in zip(factors, own, strict=True) if f for a in f.atoms if a not in axis))
    sizes = [fixed_size([a]) for a in rest]
    dtype = known[0].expr.value.dtype
    for other in known[1:]:
        dtype = torch.promote_types(dtype, other.expr.value.dtype)
    parts: list[Expr] = []
    for f, axis, width in zip(factors, own, widths, strict=True):
        if f is None:
            # If another piece has a bias, a missing bias is zeros.
            parts.append(known[0].expr.call(aten.new_zeros.default, [width, *sizes], dtype=dtype))
            continue
        expr = aligned(f, (*axis, *rest)).cast(dtype)
        full = [*(fixed_size([a]) for a in axis), *sizes]
        parts.append(expr.call(aten.expand.default, full).view([width, *sizes]))
    assert all(same(axis_size(a), w) for a, w in zip(own, widths, strict=True))
    return Factor(parts[0].call(aten.cat.default, parts, 0), (into, *rest))


def _common_path(pieces: Sequence[Piece], node: fx.Node) -> tuple[Visit, ...]:
    common = set.intersection(*({v.node for v in p.path} for p in pieces))
    # The result has as many contractions as the piece with the most contractions.
    last = max((p.path[-1] for p in pieces), key=lambda v: v.contractions)
    before = (v for v in pieces[0].path if v.node in common and v.contractions < last.contractions)
    return (*before, replace(last, node=node))
