"""The reasons why a walk of the linear maps ends at an operator."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import fx

from mla_compile.passes.ir.collectives import is_collective
from mla_compile.passes.ir.graph import (
    HANDED_OVER,
    args_of,
    argument,
    elements_hint,
    is_tensor,
    operator_name,
    packet,
    shape,
    val,
)
from mla_compile.passes.ir.moves import Copy, Expand, Reorder
from mla_compile.passes.ir.operators import behind, is_contraction
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stand_in import BARRED
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.rows import picked_of

aten = torch.ops.aten


_NONLINEAR = {
    "pow", "rsqrt", "sqrt", "reciprocal", "silu", "relu", "gelu", "tanh", "sigmoid", "exp", "log", "softmax",
    "_softmax", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "mean", "sum", "var",
    "amax", "amin", "max", "min", "abs", "clamp", "sin", "cos", "round", "floor", "ceil", "trunc", "sign",
}  # fmt: skip
_TOKEN_MIXING = {
    "cumsum", "cumprod", "conv1d", "conv2d", "convolution", "roll", "flip", "sort", "topk", "index_select", "gather",
    "scatter", "index", "index_put", "index_copy", "index_add", "select_scatter", "embedding", "matmul", "bmm", "mm",
    "baddbmm", "einsum", "stack", "scan",
}  # fmt: skip
# Linear operators that work along some axes, each with the position and name of its axis argument.
_ONE_AXIS = {"cumsum": (1, "dim"), "flip": (1, "dims"), "roll": (2, "dims")}


class KnowsRows(Protocol):
    """The part of the analysis that this module needs."""

    def is_weight(self, node: fx.Node) -> bool: ...

    def same_rows(self, one: fx.Node, other: fx.Node) -> bool: ...


def _along_last(node: fx.Node, where: tuple[int, str]) -> set[bool]:
    """Return a set that contains True if ``node`` works along its last axis, and False if along another axis.

    The set is empty if an axis is not a number.
    """
    dims, rank = argument(node, *where), len(shape(args_of(node)[0]))
    several = dims if isinstance(dims, (list, tuple)) else [dims]
    return {d % rank == rank - 1 for d in several} if all(isinstance(d, int) for d in several) else set()


def _chosen(maps: KnowsRows, node: fx.Node, name: str) -> Stop:
    """Return why ``where`` or ``masked_fill`` ends the walk. The reason depends on the condition."""
    values = [n for n in node.all_input_nodes if is_tensor(n) and val(n).dtype != torch.bool]
    condition = next((n for n in node.all_input_nodes if n not in values and is_tensor(n)), None)
    if condition is None or any(maps.same_rows(condition, v) for v in values):
        return Stop(node, "nonlinear", f"{name} by a condition that is computed from the rows")
    if all(same(s, 1) for s in shape(condition)[:-1]):
        return Stop(node, "unsupported_op", f"no rule for {name} along the features")
    return Stop(node, "position_dependent", f"{name} by a condition that differs from row to row")


def computed_weight(maps: KnowsRows, node: fx.Node) -> bool:
    """Whether ``node`` is a weight, multiplied or divided by a smaller tensor that is computed from the inputs."""
    scaled = behind(node, (Copy, Reorder, Expand))[-1]
    operands = [n for n in scaled.all_input_nodes if is_tensor(n)]
    if packet(scaled) not in (aten.mul, aten.div) or len(operands) != 2:
        return False
    size = elements_hint(scaled)
    weight, factor = sorted(operands, key=elements_hint, reverse=True)
    # If the weight is the broadcast operand, the weight scales rows, or projects rows of width 1.
    scales = elements_hint(factor) < elements_hint(weight) == size
    return scales and (maps.is_weight(weight) or computed_weight(maps, weight))


def selected_weight(maps: KnowsRows, node: fx.Node) -> bool:
    """Whether ``node`` holds matrices that are selected from a weight by indices, such as an expert's matrices."""
    picked = behind(node, (Copy, Reorder, Expand))[-1]
    if packet(picked) not in (aten.index, aten.index_select):
        return False
    weight, *how = args_of(picked)
    axes = 1 if packet(picked) is aten.index_select else sum(i is not None for i in how[0])
    return maps.is_weight(weight) and len(shape(weight)) - axes >= 2


def computed_projection(node: fx.Node) -> Stop:
    """Return the reason why a projection without a fixed weight ends the walk."""
    return Stop(node, "unsupported_weight", "a projection whose weight is computed from the inputs")


def barred(_: object, node: fx.Node) -> Stop:
    """Return why the walk ends at rounded rows that have to stay rounded."""
    return Stop(
        node, "quantized_rows", f'rows are rounded here (to {node.meta[BARRED]}), and quantized="exact" keeps that'
    )


def unexplained(maps: KnowsRows, node: fx.Node) -> Stop:
    """Return why a walk ends at an input, at an operator without a rule, or at a use that the rule does not cover."""
    if node.op != "call_function":
        code = "graph_break" if HANDED_OVER in node.meta else "expanded_inputs"
        return Stop(node, code, f"{node.name} is an input of this graph")
    name = getattr(packet(node), "__name__", str(node.target))
    if is_collective(node):
        return Stop(node, "collective", f"{operator_name(node)}: data of other ranks enters here")
    # This check precedes `_NONLINEAR`, because the axis decides whether the operator mixes tokens or is nonlinear.
    if name in ("sum", "mean", "amax", "amin", "logsumexp") and _along_last(node, (1, "dim")) == {False}:
        return Stop(node, "token_mixing", f"{name} over an axis other than the last")
    if name in _NONLINEAR:
        return Stop(node, "nonlinear", f"{name} is not linear along the features")
    if name in ("where", "masked_fill") and len(node.args) == 3:
        return _chosen(maps, node, name)
    if name in _ONE_AXIS and _along_last(node, _ONE_AXIS[name]) == {True}:
        return Stop(node, "unsupported_op", f"no rule for {name} along the features")
    if (picked := picked_of(node)) is not None and picked.dim == len(shape(node)) - 1:
        return Stop(node, "unsupported_op", f"no rule for {name} along the features")
    if is_contraction(node) and any(computed_weight(maps, n) for n in node.all_input_nodes if is_tensor(n)):
        return computed_projection(node)
    if is_contraction(node) and any(selected_weight(maps, n) for n in node.all_input_nodes if is_tensor(n)):
        return Stop(node, "unsupported_op", f"{operator_name(node)} by parts of a weight that indices select")
    if name in _TOKEN_MIXING:
        return Stop(node, "token_mixing", f"{name} mixes or reorders rows")
    # A rotary embedding in complex numbers gets a better reason than "no rule".
    rotated = name == "view_as_complex" and any(packet(user) is aten.mul for user in node.users)
    if rotated or name in ("view_as_real", "mul", "add", "sub", "div"):
        how = "a complex rotation" if rotated else f"{name} with a factor"
        return Stop(node, "position_dependent", f"{how} that differs from token to token")
    return Stop(node, "unsupported_op", f"no rule for {operator_name(node)}")
