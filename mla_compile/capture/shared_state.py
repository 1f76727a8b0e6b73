"""Weights that a module holds twice: as a parameter, and in an object beside it that is no module.

That is how bitsandbytes keeps int8 weights: ``forward`` computes with ``state.CB`` and ``state.SCB``, and then writes
``weight.data = state.CB``, which is where the parameter lies already.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def drop_idle_sets(gm: fx.GraphModule, values: Sequence[object]) -> None:
    """Removes every ``a.set_(b)`` from ``gm`` where ``a`` is that memory already; ``values``: of its inputs."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True))
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", node.target) != "set_" or len(node.args) != 2:
            continue
        one, other = (given.get(n) for n in node.args)
        if _memory(one) is None or _memory(one) != _memory(other):
            continue
        for user in list(node.users):  # Dynamo counts such a write back: it is none to whoever watches the version
            user.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(user)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()


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
