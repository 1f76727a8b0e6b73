"""Transfer rules for sums: of a map and a weight, of maps of one source, and of maps of several sources.

Maps of one source become one map, and their weights are added (LoRA). Maps of several sources are kept side by side,
because ``W_a a + W_b b`` equals the joined rows ``[a | b]`` times the weight ``[W_a ; W_b]``. A sum ``W c + r``, with a
row ``r`` that all heads share, is also kept side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, axis_size, common_factors, flatten
from mla_compile.passes.ir.factors import scaled, total
from mla_compile.passes.ir.graph import args_of, bytes_hint, is_tensor, packet, shape, val
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import depends_on, leads_to
from mla_compile.passes.linear.contract import add_weight
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, Segment, broadcast_to
from mla_compile.passes.linear.segments import within
from mla_compile.passes.linear.stops import unexplained

aten = torch.ops.aten

MOST = 4
"""The most summands of one sum that are kept side by side.

In layers without norms, each residual connection would add another summand.
"""


def times(source: LinearMap, by: float) -> LinearMap | Stop:
    def scale(p: Piece) -> Piece:
        return replace(p, scale=p.scale * by, bias=None if p.bias is None else scaled(p.bias, by))

    return source.each(scale)


def add(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    a, b = args_of(node)[0], args_of(node)[1]
    alpha = node.kwargs.get("alpha", 1)
    sign = -1.0 if packet(node) is aten.sub else 1.0
    # The number would be a bias, but a weight expression has to start from a tensor of the graph.
    if isinstance(a, (int, float)) or isinstance(b, (int, float)):
        return Stop(node, "unsupported_op", "a number is added to every column")
    if not is_tensor(a) or not is_tensor(b) or not isinstance(alpha, (int, float)):
        return unexplained(maps, node)
    factor = sign * float(alpha)
    if maps.is_weight(b):
        return add_weight(maps, node, a, b, factor)
    if maps.is_weight(a):
        # In `weight - rows`, or with alpha, the factor applies to the rows, so their map would have to be scaled.
        return add_weight(maps, node, b, a, 1.0) if factor == 1.0 else unexplained(maps, node)
    left: LinearMap | Stop = maps.map(a)
    right: LinearMap | Stop = maps.map(b)
    assert isinstance(left, LinearMap)
    assert isinstance(right, LinearMap)
    # If the sides share no source, one side may be a nonlinear function, such as a norm, of the other side's rows. The
    # nonlinear operator is then to blame, not the sum.
    if not {p.source for p in left.pieces} & {p.source for p in right.pieces}:
        cause = _spoilt(maps, left, right, node) or _spoilt(maps, right, left, node)
        if cause is not None:
            return cause
        if not all(val(n).dtype.is_floating_point for n in (a, b, node)) or not _are_rows(left, right):
            return Stop(node, "unsupported_op", "a sum of maps of different sources")
        left, right = (broadcast_to(m, shape(node)) for m in (left, right))
    if isinstance(left, Stop) or isinstance(right, Stop):
        return left if isinstance(left, Stop) else right
    if any(len(m.segments[0].piece.axes) != len(shape(node)) for m in (left, right)):
        return Stop(node, "unsupported_op", "a sum of maps with different columns")
    return _side_by_side(left, right, factor, node)


def _are_rows(left: LinearMap, right: LinearMap) -> bool:
    """Whether the sum of both maps is a linear map of several joined rows, with at most ``MOST`` summands.

    A rotation does not qualify, because neither summand is projected. A residual connection ``x + f(x)`` does not
    either, because f depends on x.
    """
    whole, projected = (*left.pieces, *right.pieces), [p.source for p in (*left.pieces, *right.pieces) if p.projected]
    if not projected or len(whole) > MOST:
        return False
    as_they_are = [p.source for p in whole if not p.projected and p.source is not None]
    return not any(leads_to(x, f) for x in as_they_are for f in projected if f is not None and f is not x)


def _spoilt(maps: Maps, one: LinearMap, other: LinearMap, node: fx.Node) -> Stop | None:
    """Return why ``one``, which depends on the rows of ``other``, is not a linear map of these rows; None if unknown.

    Sources of ``one`` that are narrower than the sum ``node``, such as a key that all heads share, need no reason.
    """
    rows = {p.source for p in other.pieces if p.source is not None}
    for piece in one.pieces:
        # A projected piece is a linear map of its own rows, no matter how these rows were made.
        if piece.source is None or piece.projected or bytes_hint(piece.source) < bytes_hint(node):
            continue
        stop = maps.reasons.get(piece.source)
        # These two codes say no more than the sum's own reason.
        stated = stop is not None and stop.code not in ("position_dependent", "unsupported_op")
        if stated and depends_on(piece.source, rows):
            return stop
    return None


def _side_by_side(left: LinearMap, right: LinearMap, factor: float, node: fx.Node) -> LinearMap | Stop:
    """Add two maps range by range. If one map is segmented, the other is cut at the same columns."""
    axis = left.axis if right.axis is None else right.axis
    if axis is None:
        piece = _sum(left.segments[0].piece, right.segments[0].piece, factor, node)
        return piece if isinstance(piece, Stop) else LinearMap.single(piece)
    parts: list[Sequence[Segment]] = []
    for lmap in (left, right):
        width = axis_size(lmap.segments[0].piece.axes[axis])
        if lmap.axis not in (None, axis) or not isinstance(width, int):
            return Stop(node, "unsupported_op", "a sum of maps with different columns")
        parts.append(lmap.segments if lmap.axis is not None else [Segment(0, width, lmap.segments[0].piece)])
    bounds = sorted({at for one in parts for s in one for at in (s.start, s.stop)})
    done: list[Segment] = []
    for start, stop in pairwise(bounds):
        pieces: list[Piece] = []
        for one in parts:
            cut = within(one, axis, range(start, stop), node)
            if isinstance(cut, Stop):
                return cut
            if len(cut) != 1:  # one map has a single column, which broadcasts
                return Stop(node, "unsupported_op", "a sum of maps with different columns")
            pieces.append(cut[0].piece)
        piece = _sum(pieces[0], pieces[1], factor, node)
        if isinstance(piece, Stop):
            return piece
        done.append(Segment(start, stop, piece))
    return LinearMap(tuple(done), axis)


def _sum(a: Piece, b: Piece, factor: float, node: fx.Node) -> Piece | Stop:
    """Return ``a + factor * b``. Summands of the same source are merged, and all others are kept side by side."""
    scaled_b = replace(b, scale=b.scale * factor, bias=b.bias and scaled(b.bias, factor))
    whole = list(a.summands)
    constants: list[Piece] = []
    for one in (scaled_b, *(replace(p, scale=p.scale * factor) for p in b.added)):
        at = next((k for k, p in enumerate(whole) if p.source is one.source), None)
        if one.source is None:
            constants.append(one)
        elif at is None:
            whole.append(replace(one, added=()))
        else:
            merged = _merged(whole[at], replace(one, added=()), node)
            if isinstance(merged, Stop):
                return merged
            whole[at : at + 1] = merged
    first, *others = sorted(whole, key=lambda p: p.source is None)
    for one in (*others, *constants):
        if one.bias is not None:
            moved = _with_bias(first, one, node)
            if isinstance(moved, Stop):
                return moved
            first = moved
    others = [replace(p, bias=None, dtype=val(node).dtype) for p in others if p.source is not None]
    first = _at(first, node)
    return replace(first, dtype=val(node).dtype, added=tuple(_at(p, node) for p in others))


def _at(piece: Piece, node: fx.Node) -> Piece:
    return piece if piece.path and piece.path[-1].node is node else piece.visited(node)


def _with_bias(first: Piece, one: Piece, node: fx.Node) -> Piece | Stop:
    """Return ``first`` with the bias of ``one`` added to the bias of ``first``."""
    assert one.bias is not None
    aligned = _aligned(first, one, node)
    if isinstance(aligned, Stop):
        return aligned
    first, one = aligned
    assert one.bias is not None
    rename = dict(zip(flatten(one.axes), flatten(first.axes), strict=True))
    return replace(first, bias=total(first.bias, one.bias.renamed(rename)))


def _aligned(a: Piece, b: Piece, node: fx.Node) -> tuple[Piece, Piece] | Stop:
    """Split the axes of both maps into equal factors, so that the atoms match one to one."""
    axes = [*zip(a.axes, b.axes, strict=True)]
    axes += zip(a.source_axes, b.source_axes, strict=True) if a.source is b.source else []
    for x, y in axes:
        splits = common_factors(x, y)
        if splits is None:
            rows = {*x, *y} & (a.source_atoms | b.source_atoms)
            code = "token_mixing" if rows else "unsupported_op"
            return Stop(node, code, "a sum of maps whose axes do not line up")
        a, b = a.split(splits[0]), b.split(splits[1])
    return a, b


def _merged(a: Piece, b: Piece, node: fx.Node) -> list[Piece] | Stop:
    """Add two maps of one source into one map by adding their weights (LoRA).

    Each path may pass through narrow rows before its last projection. If these rows together are narrower than all rows
    that both paths share, both maps are returned. The narrow rows can then become the sources.
    """
    if (a.weight is None) != (b.weight is None):
        return Stop(node, "unsupported_op", "a sum of maps of different sources")
    if (narrow := _narrowest(a)) and (other := _narrowest(b)) and a.projected and b.projected:
        common = {v.node for v in b.path}
        shared = [bytes_hint(v.node) for v in a.path if v.node in common and v.contractions < a.path[-1].contractions]
        if min(shared, default=0) > narrow + other:
            return [a, b]
    aligned = _aligned(a, b, node)
    if isinstance(aligned, Stop):
        return aligned
    a, b = aligned
    rename: dict[Atom, Atom] = {}
    for own, other_atom in zip(flatten(a.axes), flatten(b.axes), strict=True):
        # The source is the same, but the tokens differ, as in `x + x.mT`.
        if (own in a.source_atoms or other_atom in b.source_atoms) and own is not other_atom:
            return Stop(node, "token_mixing", "a sum of maps of different rows")
        rename[other_atom] = own
    if a.source_axes != b.source_axes:
        return Stop(node, "unsupported_op", "a sum of maps that factor the axes of the rows differently")
    common = {v.node for v in b.path}
    last = max((a.path[-1], b.path[-1]), key=lambda v: v.contractions)
    path = (*(v for v in a.path if v.node in common), replace(last, node=node))
    bias = total(a.bias, b.bias and b.bias.renamed(rename))
    a = replace(a, bias=bias, path=path, dtype=val(node).dtype)
    if a.weight is None or b.weight is None:
        return [replace(a, scale=a.scale + b.scale)]
    weight = total(scaled(a.weight, a.scale), b.weight.renamed(rename), b.scale)
    return [replace(a, weight=weight, scale=1.0)]


def _narrowest(piece: Piece) -> int:
    """Return the bytes of the narrowest tensor before the last projection on the path to ``piece``, or 0."""
    last = piece.path[-1].contractions
    return min((bytes_hint(v.node) for v in piece.path if v.contractions < last), default=0)
