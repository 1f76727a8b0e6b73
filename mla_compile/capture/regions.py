"""A part of a Dynamo graph, replaced by the operators that it runs below the dispatcher.

For values that exist only below it: the batched tensors of ``torch.func``, and the tensors of several ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_compile.passes.ir.graph import splice

Converted = Callable[[fx.Node, Any], Any]


def write_out(
    owner: fx.GraphModule,
    region: Sequence[fx.Node],
    *,
    sizes: Sequence[fx.Node] = (),
    enter: Converted = lambda node, value: value,
    leave: Converted = lambda node, value: value,
) -> list[fx.Node]:
    """Replaces ``region`` by the operators that it runs, traced on fake values; the nodes that stand for its results.

    The nodes of ``region`` are in the order of the graph, of which ``owner`` has the constants. ``enter`` makes of what
    a node outside of it gives what the region reads, and ``leave`` of what the region makes what is read outside. The
    new operators stand where the last of the region stood. ``sizes``: symbolic numbers that the operators may be told
    of, though nothing in the region reads them.
    """
    graph = region[0].graph
    inside = set(region)
    inputs = list(dict.fromkeys([*sizes, *(n for node in region for n in node.all_input_nodes if n not in inside)]))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    nested = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in inputs:
        env[n] = nested.node_copy(n) if n.op == "get_attr" else nested.placeholder(n.name)
    for node in region:
        env[node] = nested.node_copy(node, lambda n: env[n])
    nested.output(tuple(env[n] for n in outputs))
    module = fx.GraphModule(owner, nested)
    operands = [n for n in inputs if n.op != "get_attr" and _is_traced(n)]

    def run(*values: Any, numbers: Any = maybe_enable_thunkify) -> Any:
        given = dict(zip(operands, values, strict=True))
        # The fused attention operators below the dispatcher depend on the device; written as products they do not.
        # Sizes that only metadata is made of are not traced.
        with sdpa_kernel(SDPBackend.MATH), numbers():
            read = [enter(n, given.get(n, n.meta["example_value"])) for n in inputs if n.op != "get_attr"]
            results = fx.Interpreter(module).run(*read)
        return tuple(leave(n, value) for n, value in zip(outputs, results, strict=True))

    values = [n.meta["example_value"] for n in operands]
    # Not the tracing context's mode: Dynamo makes a new one for the compiler that it calls.
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with next(modes, nullcontext()), torch.no_grad(), fx.traceback.preserve_node_meta():
        try:
            traced = make_fx(run)(*values)
        except RecursionError:
            # A number that DTensor remembers of another trace, n = s + 1, was read as n - 1 before anything asked what
            # it is, and put off; since then the tracer takes s for n - 1. Traced at once, n is made of the s that
            # comes in. Not the first choice, because no number is left out then, and not all can be traced.
            traced = make_fx(functools.partial(run, numbers=nullcontext))(*values)
    results = splice(owner, region[-1], traced, operands)
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(region):
        graph.erase_node(node)
    for node in graph.nodes:  # a later region may read these
        if "example_value" not in node.meta and "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    return list(results)


def _is_traced(node: fx.Node) -> bool:
    """Whether its value is a tensor or a number, and no object that the operators are told of."""
    return isinstance(node.meta["example_value"], (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int))
