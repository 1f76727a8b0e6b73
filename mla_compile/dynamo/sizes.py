"""One symbol for the lengths of caches that grow together.

Dynamo gives the length of each layer's cache a symbol of its own. Then whatever is computed of a size is computed anew
in each layer, from Dynamo's fake tensors to the end of the passes, and two lengths are compared again and again.
"""

from __future__ import annotations

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

from mla_compile.passes.ir.graph import argument


def begin_with_one(ctx: ComptimeContext) -> None:
    """For ``comptime``, before what is traced looks at a tensor: lengths that are equal in this call get one symbol.

    It is what torch does with ``dynamic=True``, guard included, for those floating-point inputs that have one open axis
    each, by that axis: :func:`share_lengths` says the rest when the trace is done.
    """
    mode = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().fake_mode
    if mode is None or mode.shape_env is None:
        return
    env, fake = mode.shape_env, mode.from_tensor
    known: dict[tuple[int, int], Any] = {}

    def from_tensor(tensor: Tensor, **given: Any) -> Any:
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
    """The only open axis of a tensor, whose symbol may be that of another size from now on."""
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
    """The axes that may be of any size; not those of which the user says so."""
    asked = zip(context.dynamic_sizes, context.constraint_sizes, strict=True)
    return [
        axis
        for axis, (kind, limit) in enumerate(asked)
        if kind is DimDynamic.DYNAMIC
        and (limit is None or (isinstance(limit, RelaxedUnspecConstraint) and limit.warn_only))
    ]


def share_lengths(gm: fx.GraphModule) -> None:
    """Guards that sizes which are equal in this call stay equal: from then on they have one symbol.

    Asked of floating-point inputs of one rank, along one axis. Where such sizes part later, as that of a full window
    does from that of the whole text, the guard fails once, and the graph is compiled with a symbol for each.
    """
    first: dict[tuple[int, int, int], torch.SymInt] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                bool(first.setdefault((value.dim(), axis, size.node.hint), size) == size)  # true, and guarded
    # Keys and values of an attention are as long as each other, or it fails; torch's meta kernel does not say so.
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        key, value = (_length(argument(node, i, name)) for i, name in ((1, "key"), (2, "value")))
        if key is not None and value is not None and _hint(key) == _hint(value):
            bool(key == value)


def _length(rows: Any) -> int | torch.SymInt | None:
    """The length of keys or values, where it is known in this call."""
    value = rows.meta.get("example_value") if isinstance(rows, fx.Node) else None
    length = value.shape[-2] if isinstance(value, torch.Tensor) and value.dim() > 1 else None
    return length if isinstance(length, int) or (length is not None and length.node.has_hint()) else None


def _hint(length: int | torch.SymInt) -> int:
    return length if isinstance(length, int) else int(length.node.hint)
