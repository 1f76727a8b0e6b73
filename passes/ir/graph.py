"""The few verbs every pass shares: reading nodes, and adding nodes whose metadata is right from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.sizes import Size, hint, size

OURS = "mla_compile"
"""Key in the metadata of nodes that a rewrite added."""

SHOWS = "mla_compile_shows"
"""Key in the metadata of slices of rows that were added for the analysis."""

WAITS = "mla_compile_waits"
"""Key in the metadata of nodes that nothing reads at present and that may be read again."""

SPELLED = "mla_compile_spelled"
"""Key in the metadata of nodes that were given another spelling: the operator that the user called."""


def val(node: fx.Node) -> torch.Tensor:
    """The fake tensor that describes what ``node`` computes."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} is not a tensor"
    return value


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: fx.Node) -> tuple[Size, ...]:
    return tuple(size(d) for d in val(node).shape)


def whole_rows(node: fx.Node) -> fx.Node:
    """The rows of which ``node`` shows some, where it was added to show them; else ``node`` itself."""
    while SHOWS in node.meta:
        node = args_of(node)[0]
    return node


def bytes_hint(node: fx.Node) -> int:
    """Bytes that ``node``'s value holds, at the sizes seen when the graph was traced."""
    tensor = val(node)
    total = tensor.element_size()
    for dim in tensor.shape:
        total *= hint(size(dim), dim)
    return total


def packet(node: object) -> Any:
    """The operator a node calls, overload left out (``aten.add``), or None."""
    if isinstance(node, fx.Node) and node.op == "call_function":
        return getattr(node.target, "overloadpacket", node.target)
    return None


def operator_name(node: fx.Node) -> str:
    """The operator as the user spelled it, for people to read."""
    return str(node.meta.get(SPELLED) or getattr(packet(node), "__name__", None) or node.target)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, of whatever kinds the operator takes."""
    return node.args


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


class Builder:
    """Adds nodes before ``anchor``, with fake values computed at once and the anchor's provenance copied.

    The graph stays valid after every call: metadata is never filled in later.
    """

    def __init__(self, anchor: fx.Node, fake_mode: FakeTensorMode | None) -> None:
        self.graph = anchor.graph
        self.anchor = anchor
        self.fake_mode = fake_mode

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(op, args, kwargs)
        node.meta[OURS] = True
        node.meta["val"] = evaluate_fake(self.fake_mode, op, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """A dimension to be used as an argument: the number, or a node that reads it at run time."""
        static = size(val(node).shape[dim])
        return static if isinstance(static, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if val(node).dtype == dtype else self.call(torch.ops.aten._to_copy.default, node, dtype=dtype)


def splice(
    gm: fx.GraphModule, anchor: fx.Node, traced: fx.GraphModule, operands: Sequence[fx.Node]
) -> tuple[fx.Node, ...]:
    """Adds the operators of ``traced`` before ``anchor`` and returns its results. Its constants go into ``gm``."""
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    with anchor.graph.inserting_before(anchor):
        for own in traced.graph.nodes:
            if own.op in ("placeholder", "output"):
                continue
            node = env[own] = anchor.graph.node_copy(own, lambda n: env[n])
            node.meta.setdefault("stack_trace", anchor.meta.get("stack_trace"))
            if own.op == "get_attr":
                name = str(own.target)
                while hasattr(gm, name):
                    name += "_"
                setattr(gm, name, getattr(traced, str(own.target)))
                node.target = name
    returned: Any = traced.graph.output_node().args[0]
    return tuple(env[n] for n in (returned if isinstance(returned, (tuple, list)) else (returned,)))


def evaluate_fake(
    fake_mode: FakeTensorMode | None, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``op`` returns for the fake values of its node arguments."""

    def value(node: fx.Node) -> Any:
        return node.meta["val"]

    real_args, real_kwargs = fx.map_arg(args, value), fx.map_arg(kwargs, value)
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        return op(*real_args, **real_kwargs)
