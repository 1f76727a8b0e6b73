"""Inlines graphs nested in a Dynamo graph.

``aot_export_module(pre_dispatch=True)`` does not support two kinds of nested graphs. The first kind is called once by
an operator (``torch.utils.checkpoint``, regions marked for compilation). The second kind is a level of ``torch.func``
(vmap), whose batched tensors exist only below the dispatcher. If the passes rewrite nothing, the original graph is
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast

from mla_compile.capture import autocast
from mla_compile.capture.regions import write_out
from mla_compile.core.program import copy_graph, graph_module
from mla_compile.errors import CaptureError

# Operator -> the positions of two arguments: the nested graph and the first operand.
_CALLERS = {"tag_activation_checkpoint": (0, 1), "wrap_activation_checkpoint": (0, 1), "wrap": (0, 1)}
_CALLERS["invoke_subgraph"] = (0, 2)  # argument 1 is the name of the region
# arguments 0 to 3: the device, the dtype, whether autocast is on, whether casts are cached
_CALLERS["wrap_with_autocast"] = (4, 5)
_CALLERS["wrap_with_set_grad_enabled"] = (1, 2)  # argument 0 is the mode, which is irrelevant without gradients


def written_out(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` without nested calls and levels of ``torch.func``, or ``gm`` if it has none."""
    gm = calls_written_out(gm)
    if not any(map(_is_level, gm.graph.nodes)):
        return gm
    graph = copy_graph(gm.graph)
    regions = list(_regions(graph))
    if not regions:
        return gm
    if autocast.is_active() or autocast.has_regions(gm):
        raise CaptureError("autocast is active, and its casts of the batched tensors of torch.func are not visible")
    owner = graph_module(gm, graph)
    for region in regions:
        write_out(owner, region)
    graph.lint()
    owner.recompile()
    return owner


def calls_written_out(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` without nested calls, or ``gm`` if it has none."""
    if next(_calls(gm, gm.graph), None) is None:
        return gm
    graph = copy_graph(gm.graph)
    owner = graph_module(gm, graph)
    while (call := next(_calls(owner, graph), None)) is not None:
        _write_out_call(graph, *call)
    graph.lint()
    owner.recompile()
    return owner


@contextmanager
def levels_restored() -> Iterator[None]:
    """After the block, pop the levels of ``torch.func`` that a failed trace has left."""
    functorch = torch._C._functorch
    before = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        while functorch.get_dynamic_layer_stack_depth() > before:
            functorch.pop_dynamic_layer_stack()


def _calls(owner: fx.GraphModule, graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.GraphModule, Sequence[object]]]:
    """Yield each node that calls a nested graph once, with the nested graph and the operands."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        at, first = _CALLERS.get(node.target.name(), (None, 0))
        args: tuple[Any, ...] = node.args
        if at is None or not isinstance(args[at], fx.Node) or args[at].op != "get_attr":
            continue
        nested = owner.get_submodule(args[at].target)
        if isinstance(nested, fx.GraphModule):
            yield node, nested, args[first:]


def _write_out_call(graph: fx.Graph, node: fx.Node, nested: fx.GraphModule, operands: Any) -> None:
    prefix = str(next(a for a in node.all_input_nodes if a.op == "get_attr").target)
    inner = nested.graph.find_nodes(op="placeholder")
    env = dict(zip(inner, operands, strict=True))
    with graph.inserting_before(node):
        if node.target is wrap_with_autocast:
            entered = graph.call_function(autocast.ENTER, node.args[:4])
        for own in nested.graph.nodes:
            if own.op in ("placeholder", "output"):
                continue
            env[own] = graph.node_copy(own, lambda n: env[n])
            if own.op in ("get_attr", "call_module"):
                env[own].target = f"{prefix}.{own.target}"
        if node.target is wrap_with_autocast:
            graph.call_function(autocast.LEAVE, (entered,))
    results: Any = fx.map_arg(nested.graph.output_node().args[0], lambda n: env[n])
    for user in list(node.users):  # getitem: these operators return tuples only
        index: Any = user.args[1]
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(node)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield, for each outermost level of ``torch.func``, the nodes from entering to leaving the level."""
    depth = 0
    region: list[fx.Node] = []
    for node in list(graph.nodes):
        name = node.target.__name__ if _is_level(node) else ""
        if name == "lazy_load_decompositions" and not depth:
            graph.erase_node(node)
            continue
        depth += name.endswith("_increment_nesting")
        if depth:
            region.append(node)
        depth -= name.endswith("_decrement_nesting")
        if not depth and region:
            yield region
            region = []


def _is_level(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
