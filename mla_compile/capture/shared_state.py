"""Weights that a module holds twice: as a parameter, and in an object beside it that is no module.

That is how bitsandbytes keeps int8 weights: ``forward`` computes with ``state.CB`` and ``state.SCB``, and then writes
``weight.data = state.CB``, which is where the parameter lies already.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def drop_idle_sets(gm: fx.GraphModule, values: Sequence[object]) -> None:
    """Removes every ``a.set_(b)`` from ``gm`` where ``a`` is that memory already; ``values``: of its inputs."""
    for node, one, other in _sets(gm, values):
        if _memory(one) is None or _memory(one) != _memory(other):
            continue
        written: Any = node.args[0]
        for user in list(node.users):  # Dynamo counts such a write back: it is none to whoever watches the version
            user.replace_all_uses_with(written)
            gm.graph.erase_node(user)
        node.replace_all_uses_with(written)
        gm.graph.erase_node(node)
    gm.recompile()


def replaced_weights(gm: fx.GraphModule, values: Sequence[object]) -> list[torch.nn.Parameter]:
    """The parameters among the inputs ``values`` of ``gm`` whose memory it replaces: ``weight.data = x``."""
    pairs = ((one, other) for _, one, other in _sets(gm, values) if isinstance(one, torch.nn.Parameter))
    return [one for one, other in pairs if _memory(one) is None or _memory(one) != _memory(other)]


def _sets(gm: fx.GraphModule, values: Sequence[object]) -> Iterator[tuple[fx.Node, object, object]]:
    """Every ``a.set_(b)`` of ``gm``, with a and b where they are inputs."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True))
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", node.target) == "set_" and len(node.args) == 2:
            one, other = node.args
            yield node, given.get(one), given.get(other)


def state_beside_parameters(inputs: Sequence[fx.Node], values: Sequence[object]) -> set[str]:
    """The names of inputs that objects hold of which one tensor lies in the memory of a parameter."""
    parameters = {_memory(v) for v in values if isinstance(v, torch.nn.Parameter)} - {None}
    bases = {node.name: getattr(getattr(node, "_dynamo_source", None), "base", None) for node in inputs}
    holders: list[Any] = [
        bases[node.name]
        for node, value in zip(inputs, values, strict=True)
        if not isinstance(value, torch.nn.Parameter) and _memory(value) in parameters
    ]
    return {name for name, base in bases.items() if base is not None and base in holders}


def _memory(tensor: object) -> Hashable:
    """What says which numbers of which memory ``tensor`` shows; None where that cannot be told."""
    # Fake tensors, those that are made of others, and empty ones lie nowhere.
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride()
