"""Rewrites graphs of DTensors, which are spread over several ranks, to graphs of this rank's local tensors.

The rewrite happens before capture. A DTensor consists of this rank's local tensor and a spec, which says what slice of
the whole tensor is local. An operator on DTensors runs collectives and local operators. In the rewritten graph, these
collectives and local operators replace the operator, and local tensors replace DTensors. Weights are read as
``_local_tensor``, which is the same object in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.capture.regions import write_out
from mla_compile.capture.subclasses import Opened
from mla_compile.errors import CaptureError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

LOCAL = "_local_tensor"


@dataclass
class Localized:
    """The inputs of a rewritten graph, in which this rank's local tensors replace DTensors."""

    values: list[Any]
    opened: list[Opened] = field(default_factory=list)
    left_out: list[Opened] = field(default_factory=list)
    """Inputs that are Python objects, such as a mesh. The graph no longer uses them."""


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor. This check does not import DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, LOCAL) and hasattr(value, "placements")


def shared_weight(model: torch.nn.Module) -> str | None:
    """Return the name of a weight that is a DTensor, or None."""
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in named if is_dtensor(tensor)), None)


def weight_meshes(model: torch.nn.Module) -> list[DeviceMesh]:
    """Return the device meshes of the model's weights, in the order of the weights."""
    tensors = (*model.parameters(), *model.buffers())
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor)))  # type: ignore[attr-defined]


def localize(gm: fx.GraphModule, values: Sequence[Any]) -> Localized:
    """Rewrite ``gm``, a flat Dynamo graph, to compute with this rank's local tensors. Return the new inputs.

    Raises :class:`CaptureError` if the graph writes to a DTensor input, or returns a DTensor.
    """
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    objects = {n: v for n, v in zip(inputs, values, strict=True) if not isinstance(v, _PLAIN)}
    touched = _touched(graph, objects)
    done = Localized([])
    if not touched and not objects and not any(map(is_dtensor, values)):
        done.values = list(values)
        return done
    _check(graph, touched)
    specs: dict[fx.Node, DTensorSpec] = {}
    for node, value in zip(inputs, values, strict=True):
        if node in objects:
            done.left_out.append(Opened(node.name, value, ()))
        elif is_dtensor(value):
            part = _open(graph, node, value)
            specs[part] = node.meta["example_value"]._spec
            done.values.append(value._local_tensor)
            done.opened.append(Opened(node.name, value, ((part.name, (LOCAL,), value._local_tensor),)))
            graph.erase_node(node)
        else:
            done.values.append(value)

    def enter(node: fx.Node, value: Any) -> object:
        if node in objects:
            return objects[node]
        return value if node not in specs else _whole(value, specs[node])

    sizes = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["example_value"], torch.SymInt)]
    for region in _regions(touched):
        found: dict[fx.Node, Any] = {}

        def leave(node: fx.Node, value: Any, found: dict[fx.Node, object] = found) -> Any:
            if is_dtensor(value):
                found[node], value = value._spec, value._local_tensor
            # An alias gives each result its own node, because another node may have the same local tensor.
            return torch.ops.aten.alias.default(value) if isinstance(value, torch.Tensor) else value

        outputs = [n for n in region if any(user not in set(region) for user in n.users)]
        made = write_out(gm, region, sizes=sizes, enter=enter, leave=leave)
        for old, new in zip(outputs, made, strict=True):
            if old in found:
                specs[new] = found[old]
    for node in objects:
        if node.users:
            raise CaptureError(f"the graph uses {node.name}, which is no tensor and no number")
        graph.erase_node(node)
    graph.lint()
    gm.recompile()
    return done


def put_back(graph: fx.Graph, left_out: Sequence[Opened], original: fx.GraphModule) -> None:
    """Reinsert the inputs ``left_out``, which nothing reads, in the order of the placeholders of ``original``."""
    if not left_out:
        return
    known = {one.name: one.value for one in left_out}
    later = next((n for n in graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    named = {n.name: n for n in graph.find_nodes(op="placeholder")}
    for node in reversed(original.graph.find_nodes(op="placeholder")):
        if node.name in known:
            with graph.inserting_before(later):
                named[node.name] = graph.placeholder(node.name)
            named[node.name].meta["val"] = known[node.name]
        later = named.get(node.name, later)  # an input that is no tensor may have been removed


_PLAIN = (
    torch.Tensor, int, float, complex, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.ScriptObject,
    type(None),
)  # fmt: skip
"""The types of values that a graph can take; anything else is a Python object, such as a mesh."""


def _open(graph: fx.Graph, node: fx.Node, value: Any) -> fx.Node:
    """Replace ``node`` by a placeholder of this rank's local tensor; return the placeholder."""
    local, fake = value._local_tensor, node.meta["example_value"]._local_tensor
    if is_traceable_wrapper_subclass(local):
        raise CaptureError(f"{node.name} is a DTensor of {type(local).__name__}, which is made of several tensors")
    if not all(isinstance(size, int) for size in fake.shape):
        raise CaptureError(f"the size of {node.name}, a DTensor, differs from call to call")
    with graph.inserting_before(node):
        part = graph.placeholder(f"{node.name}{LOCAL}")
    part.meta["example_value"] = fake
    node.replace_all_uses_with(part)
    return part


def _whole(local: torch.Tensor, spec: object) -> object:
    from torch.distributed.tensor import DTensor  # imported on use: loads all of torch.distributed

    # DTensor's own dispatcher builds results in this way. `from_local` would compute sizes that the spec already has.
    return DTensor(local, spec, requires_grad=False)


def _leaves(node: fx.Node) -> list[object]:
    return pytree.tree_leaves(node.meta.get("example_value"))


def _touched(graph: fx.Graph, objects: dict[fx.Node, object]) -> list[fx.Node]:
    """Return the operators that read or make a DTensor, or that read a Python object."""
    return [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
        and any(n in objects or any(map(is_dtensor, _leaves(n))) for n in (node, *node.all_input_nodes))
    ]


def _check(graph: fx.Graph, touched: Sequence[fx.Node]) -> None:
    for node in graph.output_node().all_input_nodes:
        if any(map(is_dtensor, _leaves(node))):
            raise CaptureError(f"the graph returns {node.name}, a DTensor: return its to_local()")
    for node in touched:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        written = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if written or node.target is operator.setitem:
            raise CaptureError(f"{name} writes to a DTensor in place")


def _regions(touched: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Group the ``touched`` operators into regions, which are traced one by one. Most regions have one operator.

    Two operators share a region if one of them passes the other more than a tensor and a spec. Examples are tuples, and
    partial sums with further state (which rows of a vocabulary this rank lacks).
    """
    leader = {node: node for node in touched}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for node in touched:
        for user in node.users if _is_more(node) else ():
            if user in leader:
                a, b = find(node), find(user)
                first, later = (a, b) if a < b else (b, a)
                leader[later] = first
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in touched:
        groups.setdefault(find(node), []).append(node)
    # Groups are sorted by their last operators, because all inputs are available only at a group's last operator.
    return sorted(groups.values(), key=lambda group: touched.index(group[-1]))


def _is_more(node: fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    if not is_dtensor(value):
        return isinstance(value, (tuple, list))
    from torch.distributed.tensor import Partial, Replicate, Shard  # imported on use: loads all of torch.distributed

    return any(type(p) not in (Partial, Replicate, Shard) for p in value.placements)
