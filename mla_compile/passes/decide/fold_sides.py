"""Find projections that could be multiplied ahead of time: W_q with W_kc, and W_v with W_o."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.walk import REACH
from mla_compile.passes.linear.records import Maps, Piece
from mla_compile.passes.sources.records import AbsorbPlan
from mla_compile.passes.sources.sources import narrowest

aten = torch.ops.aten
_PROJECTIONS = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)


def fold_widths(plan: AbsorbPlan, maps: Maps) -> tuple[int | None, int | None]:
    """Return Q, the width of the rows that make the unrotated queries, and D, the width of the output projection.

    A width is None if a norm, a gate or a second reader lies between the two weights to fold.
    """
    widths = {
        _query_width(plan.site.products[t.product].q.node, range(t.start, t.stop), maps)
        for t in plan.keys
        if t.product is not None and t.piece.weight is not None
    }
    # The output over joined rows is multiplied by W_v part by part, so W_v W_o is not folded.
    projection = None if plan.value_rows.parts else output_projection(plan.site.node)
    if projection is not None:
        (piece, *others) = maps.with_sources([plan.site.node], per_row=True).map(projection).pieces
        if others or piece.source is not plan.site.node or not piece.contracted:
            projection = None
    # If segments of the query are projected from rows of different widths, there is no single Q.
    return widths.pop() if len(widths) == 1 else None, None if projection is None else _width(projection)


def _query_width(node: fx.Node, columns: range, maps: Maps) -> int | None:
    """Return Q, the width of the rows from which ``columns`` of a query tensor are projected; None if it is unknown."""
    for segment in maps.map(node).segments:
        stop = segment.stop or columns.stop
        if segment.start <= columns.start and columns.stop <= stop:
            cut = narrowest_cut(segment.piece, 0)
            return None if cut is None else _width(cut)
    return None


def output_projection(node: fx.Node) -> fx.Node | None:
    """Return the projection that reads an attention's output, directly or through operators with one reader each.

    Return None if there is none. Operators in between are not checked. The caller must check that the linear map of the
    projection reaches the attention.
    """
    for _ in range(REACH):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if node.target in _PROJECTIONS:
            return node
    return None


def _width(node: fx.Node) -> int | None:
    last = shape(node)[-1]
    return last if isinstance(last, int) else None


def narrowest_cut(piece: Piece, after: int) -> fx.Node | None:
    """Return the narrowest tensor on the path to ``piece`` that is followed by more than ``after`` projections."""
    last = piece.path[-1].contractions if piece.path else 0
    return narrowest(v for v in piece.path if last - v.contractions > after)
