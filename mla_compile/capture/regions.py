"""Replaces a region of a Dynamo graph by the operators that the region runs below the dispatcher.

This is needed for values that exist only below the dispatcher: the batched tensors of ``torch.func``, and DTensors.
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

Convert = Callable[[fx.Node, object], object]


def write_out(
    owner: fx.GraphModule,
    region: Sequence[fx.Node],
    *,
    sizes: Sequence[fx.Node] = (),
    enter: Convert = lambda node, value: value,
    leave: Convert = lambda node, value: value,
) -> list[fx.Node]:
    """Replace ``region`` by the operators that it runs, traced on fake values. Return the nodes of the results.

    The nodes of ``region`` are in graph order, and ``owner`` has the constants of the graph. ``enter`` converts the
    value of a node outside the region to the value that the region reads. ``leave`` converts a result of the region to
    the value that is read outside. The new operators are inserted after the last node of the region. ``sizes`` are
    symbolic numbers that the new operators may use although the region itself does not read them.
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
        # Below the dispatcher, fused attention operators depend on the device, but the math backend does not. With the
        # default ``numbers``, sizes that are used only in metadata are not traced.
        with sdpa_kernel(SDPBackend.MATH), numbers():
            read = [enter(n, given.get(n, n.meta["example_value"])) for n in inputs if n.op != "get_attr"]
            results = fx.Interpreter(module).run(*read)
        return tuple(leave(n, value) for n, value in zip(outputs, results, strict=True))

    values = [n.meta["example_value"] for n in operands]
    # Use the fake mode of the values. The tracing context has another mode, made by Dynamo for the compiler it calls.
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with next(modes, nullcontext()), torch.no_grad(), fx.traceback.preserve_node_meta():
        try:
            traced = make_fx(run)(*values)
        except RecursionError:
            # DTensor caches symbolic numbers across traces. If n = s + 1 comes from another trace, a lazy tracer
            # expresses s by n, and n by s, without end. An eager tracer computes n from the input s. Eager tracing is
            # only the fallback, because some numbers cannot be traced.
            traced = make_fx(functools.partial(run, numbers=nullcontext))(*values)
    results = splice(owner, region[-1], traced, operands)
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(region):
        graph.erase_node(node)
    for node in graph.nodes:  # a later region may read these values
        if "example_value" not in node.meta and "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    return list(results)


def _is_traced(node: fx.Node) -> bool:
    """Whether the value of a node is a tensor or a number, as opposed to a Python object."""
    return isinstance(node.meta["example_value"], (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int))
