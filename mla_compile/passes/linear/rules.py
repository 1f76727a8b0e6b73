"""The transfer rules of :mod:`mla_compile.passes.linear.analysis`: what each operator does to a linear map.

A rule takes the analysis and a node. It returns the node's map, or a :class:`Stop` that says why the node has none. The
maps of the operands exist when the rule is called. The rules for operators that move numbers are in :mod:`views` and
:mod:`segments`, the rules for contractions with weights in :mod:`contract`, and the rules for sums in :mod:`sums`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import args_of, is_tensor, packet, val
from mla_compile.passes.ir.operators import decode, rule_for
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.contract import CONTRACTION_RULES, batch_norm, multiply_weight
from mla_compile.passes.linear.records import LinearMap, Maps, finish
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
from mla_compile.passes.linear.sums import add, times
from mla_compile.passes.linear.views import copied, dropped, rearranged

aten = torch.ops.aten
Rule = Callable[[Maps, fx.Node], "LinearMap | Stop"]


def negate(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    return finish(times(maps.map(args_of(node)[0]), -1.0), node)


def multiply(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    a, b = args_of(node)[0], args_of(node)[1]
    # A division by the rows is not linear in the rows. A division that rounds its result is not linear either.
    if packet(node) is aten.div and (
        not isinstance(a, fx.Node) or maps.is_weight(a) or node.kwargs.get("rounding_mode")
    ):
        return unexplained(maps, node)
    if not isinstance(a, fx.Node) or maps.is_weight(a):
        a, b = b, a
    if not is_tensor(a):  # a weight times a size
        return unexplained(maps, node)
    # Integer tensors are positions or indices. Their products are not rows.
    if not val(node).dtype.is_floating_point or not val(a).dtype.is_floating_point:
        return unexplained(maps, node)
    if isinstance(b, (int, float)):
        return finish(times(maps.map(a), 1.0 / b if packet(node) is aten.div else float(b)), node)
    if not maps.is_weight(b):
        of_rows = is_tensor(b) and maps.same_rows(a, b)
        code, what = ("nonlinear", "the rows") if of_rows else ("position_dependent", "the inputs")
        return Stop(node, code, f"{packet(node).__name__} with a factor that is computed from {what}")
    return multiply_weight(maps, node, a, b, reciprocal=packet(node) is aten.div)


def result_of_several(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of the first result of a batch norm. All other operators with several results end the walk."""
    whole, at = args_of(node)
    if packet(whole) is aten._native_batch_norm_legit_no_training and at == 0:
        return batch_norm(maps, node, whole)
    return unexplained(maps, node)


def reinterpreted(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Refuse a view that changes the dtype. :func:`decode` returns no record for such a view."""
    return Stop(node, "nonlinear", f"the same bytes read as {val(node).dtype}")


MOVES: dict[type, Callable[[Maps, fx.Node, Any], LinearMap | Stop]] = {
    moves.Copy: copied,
    moves.Dropout: dropped,
    moves.Rearrange: rearranged,
    moves.Slice: sliced,
    moves.Select: selected,
    moves.Join: joined,
    moves.Stack: stacked_up,
    moves.Assign: assigned,
    moves.Write: written,
    moves.WriteOne: written_one,
    moves.Fill: filled,
}
"""Rules for operators that only move numbers, by the class of the record that :func:`decode` returns."""

RULES: dict[object, Rule] = {
    operator.getitem: result_of_several,
    aten.view: reinterpreted,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), pad),
    aten.neg: negate,
    **dict.fromkeys((aten.mul, aten.div, aten.multiply, aten.true_divide), multiply),
    **dict.fromkeys((aten.add, aten.sub), add),
    **dict.fromkeys((aten.index, aten.index_select), unexplained),  # virtual slices use `some_rows` instead
    **CONTRACTION_RULES,
}
"""Rules for operators without a record from :func:`decode`, by operator."""


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule for ``node``; None if there is none."""
    how = decode(node)
    if how is None:
        return RULES.get(packet(node))
    move = rule_for(MOVES, how)
    return None if move is None else lambda maps, node: move(maps, node, how)
