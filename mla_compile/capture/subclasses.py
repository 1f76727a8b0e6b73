"""Shows the passes the plain tensors inside of tensor subclasses (quantized weights).

A subclass that ``torch.compile`` can trace names its plain tensors and can be rebuilt from them. The graph is traced
with the plain tensors as inputs. After the trace, the graph reads the plain tensors from the subclass with ``getattr``,
so that callers pass the same inputs as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.errors import CaptureError


@dataclass(frozen=True)
class Opened:
    """An input that is a subclass, and the plain tensors that replace the input during the trace.

    ``rebuild`` makes the subclass from them; it is None for a DTensor, which holds more than its local tensor.
    """

    name: str
    value: Any
    parts: tuple[tuple[str, tuple[str, ...], torch.Tensor], ...]  # name, attribute path, tensor
    rebuild: _Rebuild | None = None


class _Rebuild:
    """Rebuilds a subclass from its plain tensors, nested subclasses included."""

    __name__ = "rebuild"

    def __init__(self, value: Any) -> None:
        self.kind, self.size, self.stride = type(value), value.size(), value.stride()
        self.names, self.context = value.__tensor_flatten__()
        inner = [getattr(value, name) for name in self.names]
        self.inner = [_Rebuild(v) if is_traceable_wrapper_subclass(v) else None for v in inner]
        self.count: int = sum([1 if r is None else r.count for r in self.inner])

    def __call__(self, *plain: torch.Tensor) -> object:
        values: dict[str, object] = {}
        left = list(plain)
        for name, rebuild in zip(self.names, self.inner, strict=True):
            count = 1 if rebuild is None else rebuild.count
            own, left = left[:count], left[count:]
            values[name] = own[0] if rebuild is None else rebuild(*own)
        return self.kind.__tensor_unflatten__(values, self.context, self.size, self.stride)


def open_subclasses(gm: fx.GraphModule, values: Sequence[object]) -> tuple[list[object], list[Opened]]:
    """Replace the inputs of ``gm`` that are subclasses by plain tensors. Return the new values and replaced inputs."""
    plain: list[object] = []
    opened: list[Opened] = []
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    body = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node, value in zip(inputs, values, strict=True):
        if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
            plain.append(value)
            continue
        parts = []
        with graph.inserting_before(node):
            for path, tensor in _plain(value):
                part = graph.placeholder("_".join((node.name, *path)))
                parts.append((part, path, tensor))
        with graph.inserting_before(body):
            rebuild = _Rebuild(value)
            whole = graph.call_function(rebuild, tuple(part for part, *_ in parts))
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        plain += [tensor for *_, tensor in parts]
        named = tuple((part.name, path, tensor) for part, path, tensor in parts)
        opened.append(Opened(node.name, value, named, rebuild))
    if opened:
        gm.recompile()
    return plain, opened


def close_subclasses(
    graph: fx.Graph, opened: Sequence[Opened], mutated: Sequence[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Restore the opened inputs, and let the graph read the plain tensors from them.

    Return a dict: name of an opened input -> name of a node -> the plain tensor that the node reads.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {one.name: {} for one in opened}
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    body = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for one in opened:
        if any(name in mutated for name, *_ in one.parts):
            raise CaptureError(f"{one.name} is a tensor subclass made of several tensors, and the graph writes to it")
        with graph.inserting_before(nodes[one.parts[0][0]]):
            whole = graph.placeholder(one.name)
        # Passes read the plain tensors again and compute with them, so that their values have to be fake as well.
        fakes = [nodes[name].meta["val"] for name, *_ in one.parts]
        whole.meta["val"] = one.value if one.rebuild is None else one.rebuild(*fakes)
        for name, path, tensor in one.parts:
            part = whole
            with graph.inserting_before(body):
                for attribute in path:
                    part = graph.call_function(getattr, (part, attribute))
                    part.meta["val"] = getattr(part.args[0].meta["val"], attribute)  # type: ignore[union-attr]
            old = nodes[name]
            part.meta = dict(old.meta)
            old.replace_all_uses_with(part)
            graph.erase_node(old)
            part._rename(name)
            parts[one.name][part.name] = tensor  # the graph may have changed the name to a unique one
    return parts


def _plain(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Return the plain tensors in a subclass, each with the attribute path to it."""
    names, _ = value.__tensor_flatten__()
    found: list[tuple[tuple[str, ...], torch.Tensor]] = []
    for name in names:
        inner = getattr(value, name)
        own = (*path, name)
        found += _plain(inner, own) if is_traceable_wrapper_subclass(inner) else [(own, inner)]
    return found
