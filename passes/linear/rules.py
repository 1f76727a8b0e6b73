"""The transfer rules of :mod:`mla_compile.passes.linear.analysis`: what each operator does to a linear map.

A rule takes the analysis and a node and returns the node's map, or a :class:`Stop` that says why there is none. The
maps of its operands are known when it is called. Operators that move numbers have their rules in :mod:`views` and
:mod:`segments`, contractions with weights in :mod:`contract`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir import operators
from mla_compile.passes.ir.axes import Atom, common_factors, flatten
from mla_compile.passes.ir.factors import scaled, total
from mla_compile.passes.ir.graph import args_of, is_tensor, packet, shape, val
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import depends_on
from mla_compile.passes.linear.contract import CONTRACTION_RULES, add_weight, batch_norm, multiply_weight
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, finish
from mla_compile.passes.linear.segments import (
    assigned,
    filled,
    joined,
    pad,
    selected,
    sliced,
    stacked_up,
    written,
    written_one,
)
from mla_compile.passes.linear.stops import unexplained
from mla_compile.passes.linear.views import broadcast, copied, dropped, permuted, regrouped, repeated

aten = torch.ops.aten
Rule = Callable[[Maps, fx.Node], "LinearMap | Stop"]


def negate(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    return finish(_times(maps.map(args_of(node)[0]), -1.0), node)


def _times(source: LinearMap, by: float) -> LinearMap | Stop:
    def scale(p: Piece) -> Piece:
        return replace(p, scale=p.scale * by, bias=None if p.bias is None else scaled(p.bias, by))

    return source.each(scale)


def multiply(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    a, b = args_of(node)[0], args_of(node)[1]
    # Something divided by the rows is not linear in them, and a rounding mode rounds.
    if packet(node) is aten.div and (
        not isinstance(a, fx.Node) or maps.is_weight(a) or node.kwargs.get("rounding_mode")
    ):
        return unexplained(maps, node)
    if not isinstance(a, fx.Node) or maps.is_weight(a):
        a, b = b, a
    if not is_tensor(a):  # a weight times a size
        return unexplained(maps, node)
    # Positions and indices are integers, and their products are no rows.
    if not val(node).dtype.is_floating_point or not val(a).dtype.is_floating_point:
        return unexplained(maps, node)
    if isinstance(b, (int, float)):
        return finish(_times(maps.map(a), 1.0 / b if packet(node) is aten.div else float(b)), node)
    if not maps.is_weight(b):
        of_rows = is_tensor(b) and maps.same_rows(a, b)
        code, what = ("nonlinear", "the rows") if of_rows else ("position_dependent", "the inputs")
        return Stop(node, code, f"{packet(node).__name__} with a factor that is computed from {what}")
    return multiply_weight(maps, node, a, b, reciprocal=packet(node) is aten.div)


def add(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    a, b = args_of(node)[0], args_of(node)[1]
    alpha = node.kwargs.get("alpha", 1)
    sign = -1.0 if packet(node) is aten.sub else 1.0
    # In effect a bias, but there is no tensor in the graph for an expression of it to start from.
    if isinstance(a, (int, float)) or isinstance(b, (int, float)):
        return Stop(node, "unsupported_op", "a number is added to every column")
    if not is_tensor(a) or not is_tensor(b) or not isinstance(alpha, (int, float)):
        return unexplained(maps, node)
    factor = sign * float(alpha)
    if maps.is_weight(b):
        return add_weight(maps, node, a, b, factor)
    if maps.is_weight(a):
        # `weight - rows`, or a scaled sum, would have to scale the map of the rows instead.
        return add_weight(maps, node, b, a, 1.0) if factor == 1.0 else unexplained(maps, node)
    left, right = maps.map(a), maps.map(b)
    # No source in common. If one side was spoilt on its way from the rows of the other (by a norm, say), that node is
    # the cause and not this sum.
    if not {p.source for p in left.pieces} & {p.source for p in right.pieces}:
        cause = _spoilt(maps, left, right) or _spoilt(maps, right, left)
        if cause is not None:
            return cause
        projected = all(p.projected for p in (*left.pieces, *right.pieces))
        code = "too_many_sources" if projected else "unsupported_op"
        return Stop(node, code, "a sum of maps of different sources")
    for m, x in ((left, a), (right, b)):
        if len(shape(x)) != len(shape(node)) or m.axis is not None:
            return Stop(node, "unsupported_op", "a sum of maps with different columns")
    piece = _sum(left.pieces[0], right.pieces[0], factor, node)
    return piece if isinstance(piece, Stop) else LinearMap.single(piece)


def _spoilt(maps: Maps, one: LinearMap, other: LinearMap) -> Stop | None:
    """Why ``one`` is no map of the rows of ``other``, where it is made of them: what was done on the way."""
    rows = {p.source for p in other.pieces if p.source is not None}
    for piece in one.pieces:
        stop = None if piece.source is None else maps.reasons.get(piece.source)
        # These two say no more than this sum would say itself.
        if stop is not None and stop.code not in ("position_dependent", "unsupported_op"):
            assert piece.source is not None
            if depends_on(piece.source, rows):
                return stop
    return None


def _sum(a: Piece, b: Piece, factor: float, node: fx.Node) -> Piece | Stop:
    """``a + factor * b`` for two maps of one source: the weights are added (LoRA)."""
    if a.source is None or a.source is not b.source or (a.weight is None) != (b.weight is None):
        return Stop(node, "unsupported_op", "a sum of maps of different sources")
    # Both maps are brought to the same factors before their atoms are matched one to one.
    for x, y in zip((*a.axes, *a.source_axes), (*b.axes, *b.source_axes), strict=True):
        splits = common_factors(x, y)
        if splits is None:
            rows = {*x, *y} & (a.source_atoms | b.source_atoms)
            code = "token_mixing" if rows else "unsupported_op"
            return Stop(node, code, "a sum of maps whose axes do not line up")
        a, b = a.split(splits[0]), b.split(splits[1])
    rename: dict[Atom, Atom] = {}
    for own, other in zip(flatten(a.axes), flatten(b.axes), strict=True):
        # As in `x + x.mT`: the same source, but another token of it.
        if (own in a.source_atoms or other in b.source_atoms) and own is not other:
            return Stop(node, "token_mixing", "a sum of maps of different rows")
        rename[other] = own
    if a.source_axes != b.source_axes:
        return Stop(node, "unsupported_op", "a sum of maps that see the rows in different factors")
    common = {v.node for v in b.path}
    last = max((a.path[-1], b.path[-1]), key=lambda v: v.contractions)
    path = (*(v for v in a.path if v.node in common), replace(last, node=node))
    bias = total(a.bias, b.bias and b.bias.renamed(rename), factor)
    a = replace(a, bias=bias, path=path, dtype=val(node).dtype)
    if a.weight is None or b.weight is None:
        return replace(a, scale=a.scale + factor * b.scale)
    weight = total(scaled(a.weight, a.scale), scaled(b.weight.renamed(rename), b.scale), factor)
    return replace(a, weight=weight, scale=1.0)


def result_of_several(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """What a batch norm makes of its input is the first of its results."""
    whole, at = args_of(node)
    if packet(whole) is aten._native_batch_norm_legit_no_training and at == 0:
        return batch_norm(maps, node, whole)
    return unexplained(maps, node)


def reinterpreted(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """A view that :func:`decode` does not take for one."""
    return Stop(node, "nonlinear", f"the same bytes read as {val(node).dtype}")


MOVES: dict[type, Callable[[Maps, fx.Node, Any], LinearMap | Stop]] = {
    operators.Copy: copied,
    operators.Dropout: dropped,
    operators.Regroup: regrouped,
    operators.Permute: permuted,
    operators.Broadcast: broadcast,
    operators.Repeat: repeated,
    operators.Slice: sliced,
    operators.Select: selected,
    operators.Join: joined,
    operators.Stack: stacked_up,
    operators.Assign: assigned,
    operators.Write: written,
    operators.WriteOne: written_one,
    operators.Fill: filled,
}
"""The rules of operators that only move numbers, by what :func:`decode` says of them."""

RULES: dict[object, Rule] = {
    operator.getitem: result_of_several,
    aten.view: reinterpreted,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), pad),
    aten.neg: negate,
    **dict.fromkeys((aten.mul, aten.div, aten.multiply, aten.true_divide), multiply),
    **dict.fromkeys((aten.add, aten.sub), add),
    **CONTRACTION_RULES,
}
"""The rules of operators that compute, by operator."""


def rule_of(node: fx.Node) -> Rule | None:
    """What gives the map of ``node`` from those of its operands; None where nothing does."""
    how = decode(node)
    if how is None:
        return RULES.get(packet(node))
    move = MOVES.get(type(how))
    return None if move is None else lambda maps, node: move(maps, node, how)
