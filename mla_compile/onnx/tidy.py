"""Rewrite small patterns of an FX graph that ONNX, or a runtime on a CPU, does not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mla_compile.core.program import Program
from mla_compile.passes.ir.graph import Builder, argument, axis, packet, val
from mla_compile.passes.ir.sizes import size
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten
_CHECKS = (
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
)


def tidy(program: Program) -> int:
    """Apply all rewrites. Return how many operators they removed or examined."""
    graph = program.gm.graph
    checks = [n for n in graph.nodes if n.op == "call_function" and n.target in _CHECKS]
    for node in reversed(checks):  # ONNX has no operator that raises
        graph.erase_node(node)
    found = [n for n in graph.nodes if packet(n) in _RULES]
    for node in found:
        _RULES[packet(node)](node, Builder(node, program.fake_mode))
    remove_dead_code(graph)
    return len(checks) + len(found)


def without_schedules(graph: fx.Graph) -> int:
    """Remove schedules, which ONNX lacks, and return their number. Each attention then prepares its own launch."""
    found = graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_schedule.default)
    for node in found:
        for user in list(node.users):
            user.update_kwarg("schedule", None)
        graph.erase_node(node)
    return len(found)


def _squeeze(node: fx.Node, builder: Builder) -> None:
    """Squeeze only axes of size 1. For other axes, torch does nothing, but ONNX raises an error."""
    source, dims = argument(node, 0, "self"), argument(node, 1, "dim")
    if dims is None or not val(source).dim():
        return
    wanted = [dims] if isinstance(dims, int) else list(dims)
    kept = [dim for dim in wanted if size(val(source).shape[dim]) == 1]
    if len(kept) != len(wanted):
        node.replace_all_uses_with(builder.call(aten.squeeze.dims, source, kept) if kept else source)


def _slice_scatter(node: fx.Node, builder: Builder) -> None:
    """Replace slice writes by a concatenation if the writes together fill a new tensor.

    Before: ``slice_scatter(slice_scatter(new_empty, a, d, 0, n), b, d, n, end)``. After: ``cat([a, b], d)``.
    """
    dim = axis(argument(node, 2, "dim", 0), val(node).dim())
    width = size(val(node).shape[dim])
    parts: dict[int, tuple[fx.Node, int]] = {}
    current: Any = node
    while packet(current) is aten.slice_scatter and axis(argument(current, 2, "dim", 0), val(node).dim()) == dim:
        start, end = argument(current, 3, "start"), argument(current, 4, "end")
        start, end = start if start is not None else 0, end if end is not None else width
        if argument(current, 5, "step", 1) != 1 or not all(isinstance(x, int) for x in (start, end, width)):
            return
        assert isinstance(width, int)
        if start in parts:
            return  # a later write (visited earlier) starts at the same index, so this is not a concatenation
        parts[start] = (argument(current, 1, "src"), min(end, width))
        current = argument(current, 0, "self")
    at = 0
    pieces = []
    for start in sorted(parts):
        source, end = parts[start]
        if start != at or val(source).dtype != val(node).dtype:
            return
        pieces.append(source)
        at = end
    if at == width and len(pieces) > 1:
        node.replace_all_uses_with(builder.call(aten.cat.default, pieces, dim))


def _index_add(node: fx.Node, builder: Builder) -> None:
    """Compute ``index_add`` in float32, because CPU runtimes cannot scatter half precision.

    A chain of ``index_add``, with one for each expert, stays in float32 until its end.
    """
    dtype = val(node).dtype
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return
    into, dim, index, source = (argument(node, i, n) for i, n in enumerate(("self", "dim", "index", "source")))
    if packet(into) is aten._to_copy and val(into.args[0]).dtype == torch.float32:
        into = into.args[0]
    into, source = (builder.cast(x, torch.float32) for x in (into, source))
    total = builder.call(aten.index_add.default, into, dim, index, source, **node.kwargs)
    node.replace_all_uses_with(builder.cast(total, dtype))


_RULES = {aten.squeeze: _squeeze, aten.slice_scatter: _slice_scatter, aten.index_add: _index_add}
