"""Gives the lengths of caches that grow together one common symbol.

Dynamo gives the length of each layer's cache its own symbol. Everything that depends on a length is then computed again
in each layer, from Dynamo's fake tensors to the end of the passes, and lengths are compared again and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.comptime import ComptimeContext
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    StatefulSymbolicContext,
    SubclassSymbolicContext,
)

from mla_compile.dynamo.causes import is_within
from mla_compile.dynamo.kept import kept, seen, source_name
from mla_compile.passes.ir.graph import argument


def begin_apart(ctx: ComptimeContext, history: History) -> None:
    """Make the layout of tensors that fill and drain as dynamic as their length.

    This runs as a ``comptime`` function, before the trace reads a tensor. A partly drained tensor is a view with an
    offset, and has the strides of the whole tensor. Dynamo would infer strides from sizes, and treat an offset of 0 or
    1 as a constant. Each layout would then need a separate graph. The stride along the length is dynamic, too: the
    first row of a batch keeps the layout in which it was made, and later rows are stored token by token. If an argument
    has a size of 1 (one token, one request), that size stays constant.
    """
    mode = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().fake_mode
    if mode is None or mode.shape_env is None:
        return
    env, fake = mode.shape_env, mode.from_tensor
    given_settings = env.settings
    any_offset = dataclasses.replace(given_settings, specialize_zero_one=False)

    def from_tensor(tensor: Tensor, **given: Any) -> object:
        context = given.get("symbolic_context")
        if not isinstance(context, StatefulSymbolicContext):
            return fake(tensor, **given)
        axes, inside = _open_axes(context), is_within(source_name(given["source"]))
        if not axes and inside:
            for axis in _loose_axes(tensor):
                context.dynamic_strides[axis] = DimDynamic.DYNAMIC
        if not axes:
            return fake(tensor, **given)
        if not inside:
            for axis in (one for one in axes if tensor.shape[one] == 1):
                context.dynamic_sizes[axis], context.constraint_sizes[axis] = DimDynamic.STATIC, None
            return fake(tensor, **given)
        name = source_name(given["source"])
        for axis in axes:
            # Models test whether a tensor has rows, so a size of 0 stays constant until the tensor has had a row.
            if tensor.shape[axis] == 0 and not history.filled(name, axis):
                context.dynamic_sizes[axis], context.constraint_sizes[axis] = DimDynamic.STATIC, None
        for axis in range(max(axes) + 1):
            if context.dynamic_strides[axis] is DimDynamic.INFER_STRIDE:
                context.dynamic_strides[axis] = DimDynamic.DYNAMIC
        env.settings = any_offset
        try:
            return fake(tensor, **given)
        finally:
            env.settings = given_settings

    vars(mode)["from_tensor"] = from_tensor


def _loose_axes(tensor: Tensor) -> list[int]:
    """Return the axes whose strides differ from a contiguous tensor's, as in a window cut from a larger tensor."""
    found, step = [], 1
    for axis in reversed(range(tensor.dim())):
        if tensor.stride(axis) != step:
            found.append(axis)
        step *= tensor.shape[axis]
    return found


def begin_with_one(ctx: ComptimeContext) -> None:
    """Give lengths that are equal in this call one common symbol.

    This runs as a ``comptime`` function, before the trace reads a tensor. ``dynamic=True`` in torch does the same, and
    adds the same guard. This function affects only floating-point inputs with exactly one dynamic axis. Two inputs
    share a symbol only if they have equal numbers of axes and the same axis is dynamic. After the trace,
    :func:`share_lengths` compares the symbolic sizes of all floating-point inputs.
    """
    mode = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().fake_mode
    if mode is None or mode.shape_env is None:
        return
    env, fake = mode.shape_env, mode.from_tensor
    known: dict[tuple[int, int], Any] = {}

    def from_tensor(tensor: Tensor, **given: Any) -> object:
        axis = _opened(given.get("symbolic_context")) if tensor.is_floating_point() else None
        if axis is None:
            return fake(tensor, **given)
        others, env.val_to_var = env.val_to_var, known.setdefault((tensor.dim(), axis), {})
        try:
            return fake(tensor, **given)
        finally:
            env.val_to_var = others

    vars(mode)["from_tensor"] = from_tensor


def _opened(context: object) -> int | None:
    """If a tensor has exactly one dynamic axis, let this axis share a symbol, and return the axis; else None."""
    if not isinstance(context, StatefulSymbolicContext):
        return None
    inner = context.inner_contexts.values() if isinstance(context, SubclassSymbolicContext) else ()
    all_axes = [(one, _open_axes(one)) for one in (context, *inner) if isinstance(one, StatefulSymbolicContext)]
    if len(all_axes[0][1]) != 1 or any(len(axes) > 1 for _, axes in all_axes):
        return None
    for one, axes in all_axes:
        for axis in axes:
            one.dynamic_sizes[axis], one.constraint_sizes[axis] = DimDynamic.DUCK, None
    return all_axes[0][1][0]


def _open_axes(context: StatefulSymbolicContext) -> list[int]:
    """Return the axes of dynamic size, except those that the user marked as dynamic."""
    asked = zip(context.dynamic_sizes, context.constraint_sizes, strict=True)
    return [
        axis
        for axis, (kind, limit) in enumerate(asked)
        if kind is DimDynamic.DYNAMIC
        and (limit is None or (isinstance(limit, RelaxedUnspecConstraint) and limit.warn_only))
    ]


class History:
    """The sizes of one function's inputs before and after each of its graphs."""

    def __init__(self) -> None:
        self._graphs: list[dict[str, tuple[int, ...]]] = []
        self._left: list[Mapping[str, tuple[int, ...]]] = []

    def add(self, gm: fx.GraphModule) -> None:
        """Record the sizes before and after a graph."""
        values = ((node, node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder"))
        sizes = {
            _name(node): tuple(map(seen, value.shape)) for node, value in values if isinstance(value, torch.Tensor)
        }
        self._graphs.append(sizes)
        self._left.append(kept(gm).left)

    def filled(self, name: str, axis: int) -> bool:
        """Whether an input had a row along an axis in any graph."""
        return any(sizes[name][axis] for sizes in self._graphs if axis < len(sizes.get(name, ())))

    def of(self, node: fx.Node, axis: int) -> tuple[int | None, ...]:
        """Return the sizes of an input along one axis before and after each graph; ``None`` where a graph lacks it."""
        shapes = (sizes.get(_name(node), ()) for sizes in (*self._graphs, *self._left))
        return tuple(shape[axis] if axis < len(shape) else None for shape in shapes)


def _name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else source_name(source)


def share_lengths(gm: fx.GraphModule, history: History | None = None) -> None:
    """Add guards that sizes stay equal if they are equal in this call. Equal sizes then have one symbol.

    Sizes are compared along the same axis, between floating-point inputs with equal numbers of axes. Equal sizes may
    differ later: a full sliding window stops growing, while the text grows. The guard then fails once, and the graph is
    recompiled with a symbol for each size. If there is a ``history``, only sizes that were equal in all graphs so far
    are guarded, because tensors that fill and drain often have equal sizes by chance.
    """
    first: dict[tuple[int, int, Any], torch.SymInt] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                sizes = size.node.hint if history is None else history.of(node, axis)
                bool(first.setdefault((value.dim(), axis, sizes), size) == size)  # true here, and adds a guard
    # Keys and values of an attention have equal lengths, but torch's meta kernel adds no guard for that.
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        key, value = (_length(argument(node, i, name)) for i, name in ((1, "key"), (2, "value")))
        if key is not None and value is not None and seen(key) == seen(value):
            bool(key == value)


def _length(rows: Any) -> int | torch.SymInt | None:
    """Return the length of keys or values; None if it is not known in this call."""
    value = rows.meta.get("example_value") if isinstance(rows, fx.Node) else None
    length = value.shape[-2] if isinstance(value, torch.Tensor) and value.dim() > 1 else None
    return length if isinstance(length, int) or (length is not None and length.node.has_hint()) else None
