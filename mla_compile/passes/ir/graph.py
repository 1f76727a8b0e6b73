"""Helpers for all passes. They read nodes, and they add nodes with complete metadata."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from mla_compile.passes.ir.schema import foreign_name
from mla_compile.passes.ir.sizes import Size, hint, size

OURS = "mla_compile"
"""Metadata key of a node that a rewrite added."""

ORIGIN = "mla_compile_origin"
"""Metadata key of a node that computes the same values as a node of the original graph.

It holds the name of the original node.
"""

DECIDED_BY = "mla_compile_decided_by"
"""Metadata key of a virtual node (:func:`virtual`). It holds the graph nodes that determine the node's value."""

BESIDE = "mla_compile_beside"
"""Metadata key of an input that holds rows while another buffer still holds K or V.

The value is the name of the other buffer.
"""

ROWS = "mla_compile_rows"
"""Metadata key of an input that holds rows. In the captured program, this input held K or V."""

TOLD = "mla_compile_told"
"""Metadata key of an attention. It holds a note for the user on how the attention was read."""

HANDED_OVER = "mla_compile_handed_over"
"""Metadata key of an input that Dynamo passes to this graph from the code before a graph break."""

SPELLED = "mla_compile_spelled"
"""Metadata key of a node that was canonicalised. It holds the operator that the user called."""


def val(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of ``node``."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} is not a tensor"
    return value


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_tuple(node: fx.Node) -> bool:
    """Whether ``node`` is an operator with several results, such as a split."""
    return isinstance(node.meta.get("val"), (tuple, list))


def shape(node: fx.Node) -> tuple[Size, ...]:
    return tuple(size(d) for d in val(node).shape)


def elements_hint(node: fx.Node) -> int:
    """Return the number of elements of ``node``'s value, at the sizes seen when the graph was traced."""
    return math.prod(hint(size(dim), dim) for dim in val(node).shape)


def bytes_hint(node: fx.Node) -> int:
    """Return the bytes of ``node``'s value, at the sizes seen when the graph was traced."""
    return elements_hint(node) * val(node).element_size()


def packet(node: object) -> Any:
    """Return the operator that ``node`` calls, without its overload (``aten.add``).

    Return None if ``node`` calls no operator.
    """
    # Other targets (`operator.getitem`, a higher-order operator) have no packet and are returned as they are.
    if isinstance(node, fx.Node) and node.op == "call_function":
        return getattr(node.target, "overloadpacket", node.target)
    return None


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator as the user spelled it, for messages.

    Operators outside torch keep their namespace.
    """
    return str(node.meta.get(SPELLED) or foreign_name(node) or getattr(packet(node), "__name__", None) or node.target)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments. They are untyped, because operators take different types."""
    return node.args


def argument(node: fx.Node, position: int, name: str, default: object = None) -> Any:
    """Return an argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


class Builder:
    """Adds nodes before ``anchor``. Each new node has a fake value and the provenance of ``anchor``.

    The graph is valid after every call, because no metadata is filled in later.
    """

    def __init__(self, anchor: fx.Node, fake_mode: FakeTensorMode | None) -> None:
        self.graph = anchor.graph
        self.anchor = anchor
        self.fake_mode = fake_mode

    def call(self, op: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(op, args, kwargs)
        node.meta[OURS] = True
        node.meta["val"] = evaluate_fake(self.fake_mode, op, args, kwargs)
        # These keys let a report, or an error of a later compiler, name the line of the user's model.
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def trace(self, function: Callable[..., torch.Tensor], operands: Sequence[Argument]) -> fx.Node:
        """Add the operators of ``function``, which returns one tensor. Operands are nodes or numbers."""
        (result,) = self.trace_all(function, operands)
        return result

    def trace_all(self, function: Callable[..., object], operands: Sequence[Argument]) -> tuple[fx.Node, ...]:
        """Add the operators of ``function``, which returns several tensors. Operands are nodes or numbers."""
        return self.insert(self.traced(function, operands), [n for n in operands if isinstance(n, fx.Node)])

    def traced(self, function: Callable[..., object], operands: Sequence[Argument]) -> fx.GraphModule:
        """Return the operators of ``function`` as a graph. The graph's inputs are the operands that are nodes."""

        def of_nodes(*values: torch.Tensor) -> object:
            # make_fx traces tensors only, so operands that are numbers are inserted here.
            given = iter(values)
            return function(*(next(given) if isinstance(n, fx.Node) else n for n in operands))

        with self.fake_mode or contextlib.nullcontext(), torch.no_grad():
            made: fx.GraphModule = make_fx(of_nodes)(*(n.meta["val"] for n in operands if isinstance(n, fx.Node)))
        return made

    def insert(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Add the operators of a traced function, with ``nodes`` as its inputs."""
        assert self.graph.owning_module is not None
        return splice(self.graph.owning_module, self.anchor, traced, nodes)

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """Return a dimension as an argument: a number, or a node that reads it at run time."""
        # `size` applies the guards, so a symbol that a guard fixes becomes a number and needs no node.
        static = size(val(node).shape[dim])
        return static if isinstance(static, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

    def filled(self, sizes: Sequence[int | fx.Node], value: object, like: fx.Node) -> fx.Node:
        """Return a tensor filled with ``value`` (None: uninitialized), in the dtype and on the device of ``like``."""
        own = {"dtype": val(like).dtype, "device": val(like).device}
        if value is None:
            return self.call(torch.ops.aten.empty.memory_format, sizes, **own)
        return self.call(torch.ops.aten.full.default, sizes, value, **own)

    def on_device(self, node: fx.Node, device: torch.device) -> fx.Node:
        """Move ``node``, which has one element, to ``device``.

        This is needed because mla_compile's own operators accept no CPU scalars.
        """
        if val(node).device == device:
            return node
        aten = torch.ops.aten
        # An addition accepts a CPU scalar directly. A copy would synchronise.
        zero = self.call(aten.full.default, [1] * val(node).dim(), 0, dtype=val(node).dtype, device=device)
        return self.call(aten.add.Tensor, zero, self.call(aten.reshape.default, node, []))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if val(node).dtype == dtype else self.call(torch.ops.aten._to_copy.default, node, dtype=dtype)


def new_input(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    """Add an input after all other inputs. If ``name`` is taken, the input gets another name."""
    with graph.inserting_after(next(reversed(graph.find_nodes(op="placeholder")), None)):
        node = graph.placeholder(name)
    node.target, node.meta["val"] = node.name, value  # generated code names arguments by their targets
    return node


def splice(
    gm: fx.GraphModule, anchor: fx.Node, traced: fx.GraphModule, operands: Sequence[fx.Node]
) -> tuple[fx.Node, ...]:
    """Insert the operators of ``traced`` before ``anchor`` and return the results. Constants are copied into ``gm``."""
    env = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    with anchor.graph.inserting_before(anchor):
        for own in traced.graph.nodes:
            if own.op in ("placeholder", "output"):
                continue
            node = env[own] = anchor.graph.node_copy(own, lambda n: env[n])
            node.meta.setdefault("stack_trace", anchor.meta.get("stack_trace"))
            if own.op == "get_attr":
                name = str(own.target)
                # Every trace names its constants `_tensor_constant0` and so on. Without new names, constants would
                # overwrite each other.
                while hasattr(gm, name):
                    name += "_"
                setattr(gm, name, getattr(traced, str(own.target)))
                node.target = name
    returned: object = traced.graph.output_node().args[0]
    return tuple(env[n] for n in (returned if isinstance(returned, (tuple, list)) else (returned,)))


def virtual(
    fake_mode: FakeTensorMode | None,
    op: Callable[..., object],
    of: fx.Node,
    *args: Argument,
    decided_by: Sequence[fx.Node] = (),
) -> fx.Node:
    """Return ``op(of, *args)`` as a *virtual source*, a node outside the graph.

    Analyses can read a virtual source like any node. It is not listed among the users of its inputs, so the graph does
    not change. :func:`materialize` adds a virtual source to the graph. ``decided_by``: the graph nodes that determine
    the value. A verification draws numbers for these nodes. By default, they are the nodes that determine ``of``.
    """
    # `graph.call_function` would insert the node into the graph.
    node = fx.Node(of.graph, f"{of.name}_view", "call_function", op, (of, *args), {})
    # A user outside the graph would keep dead code alive.
    for read in node.all_input_nodes:
        read.users.pop(node)
    node.meta[DECIDED_BY] = tuple(decided_by) or decides(of)
    node.meta["val"] = evaluate_fake(fake_mode, op, node.args, {})
    return node


def is_virtual(node: fx.Node) -> bool:
    return DECIDED_BY in node.meta


def decides(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the graph nodes that determine the value of ``node``: only ``node`` itself, unless it is virtual."""
    decided_by: tuple[fx.Node, ...] = node.meta.get(DECIDED_BY, (node,))
    return decided_by


_SLICES = {torch.ops.aten.slice.Tensor, torch.ops.aten.constant_pad_nd.default}
_PICKS = {torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}


def whole_rows(node: fx.Node, *, picked: bool = True) -> fx.Node:
    """Return the tensor that a virtual ``node`` slices or pads with zeros. Return any other ``node`` itself.

    ``picked``: also look through virtual nodes that index rows by a tensor.
    """
    while is_virtual(node) and (node.target in _SLICES or (picked and node.target in _PICKS)):
        node = args_of(node)[0]
    return node


def materialize(node: fx.Node, builder: Builder, memo: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return ``node``. If ``node`` is virtual, add it to the graph and return the new node.

    New nodes are added before the builder's anchor, once per ``memo``.
    """
    if not is_virtual(node):
        return node
    if node not in memo:
        args = (materialize(a, builder, memo) if isinstance(a, fx.Node) else a for a in args_of(node))
        assert callable(node.target)
        memo[node] = builder.call(node.target, *args)
    return memo[node]


def replace_each(nodes: Iterable[fx.Node], replacement: Callable[[fx.Node], fx.Node | None]) -> int:
    """Replace each node for which ``replacement`` returns another one, and erase it; return how many."""
    done = 0
    for node in list(nodes):
        new = replacement(node)
        if new is not None:
            node.replace_all_uses_with(new)
            node.graph.erase_node(node)
            done += 1
    return done


def latest_of(node: fx.Node) -> fx.Node:
    """Return the last graph node from which a virtual ``node`` is computed. Return any other ``node`` itself."""
    return max(map(latest_of, node.all_input_nodes)) if is_virtual(node) else node


def evaluate_fake(
    fake_mode: FakeTensorMode | None, op: Callable[..., object], args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> object:
    """Return the result of ``op`` on the fake values of its node arguments."""
    real_args, real_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    # On torch 2.11, composite operators support symbolic sizes only under the Python dispatcher. Without it, matmul
    # accepts only numbers.
    with fake_mode or contextlib.nullcontext(), torch.no_grad(), enable_python_dispatcher():
        return op(*real_args, **real_kwargs)


def restride(first: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    """Recompute the metadata of ``first``, and of all downstream nodes that read a tensor whose strides changed."""
    # Nodes are visited in graph order, so the inputs of a node are up to date when it is visited.
    waiting, seen = [first], {first}
    while waiting:
        node = heapq.heappop(waiting)
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # the new strides may not allow a view
        assert callable(node.target)
        old, node.meta["val"] = node.meta["val"], evaluate_fake(fake_mode, node.target, node.args, node.kwargs)
        told = node is first or _strides(old) != _strides(node.meta["val"])
        for reader in node.users if told else ():
            if reader.op == "call_function" and reader not in seen:
                seen.add(reader)
                heapq.heappush(waiting, reader)


def _strides(value: object) -> list[list[Size]]:
    # `size` is used because a comparison of torch's symbolic numbers would add guards.
    return [[size(n) for n in leaf.stride()] for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
