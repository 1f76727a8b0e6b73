"""Weights that a module holds twice: as a parameter, and in another object that is not a module.

bitsandbytes holds int8 weights in this way. Its ``forward`` computes with ``state.CB`` and ``state.SCB``, and then sets
``weight.data = state.CB``. The assignment changes nothing: ``weight`` already has the memory of ``state.CB``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SETS = ("set_", "shallow_copy_data_")
"""The functions that represent ``a.data = b`` in a graph of Dynamo. The second exists since torch 2.14."""


def drop_idle_sets(gm: fx.GraphModule, values: Sequence[object]) -> None:
    """Remove every ``a.data = b`` in which ``a`` already has ``b``'s memory. ``values`` are the inputs of ``gm``."""
    for node, one, other in _sets(gm, values):
        if _memory(one) is None or _memory(one) != _memory(other):
            continue
        written: Any = node.args[0]
        for user in list(node.users):  # Dynamo resets the version counter of ``a`` here
            user.replace_all_uses_with(written)
            gm.graph.erase_node(user)
        node.replace_all_uses_with(written)
        gm.graph.erase_node(node)
    gm.recompile()


def replaced_weights(gm: fx.GraphModule, values: Sequence[object]) -> list[torch.nn.Parameter]:
    """Return the parameters whose memory ``gm`` replaces (``weight.data = x``). ``values`` are the inputs of ``gm``."""
    pairs = ((one, other) for _, one, other in _sets(gm, values) if isinstance(one, torch.nn.Parameter))
    return [one for one, other in pairs if _memory(one) is None or _memory(one) != _memory(other)]


def _sets(gm: fx.GraphModule, values: Sequence[object]) -> Iterator[tuple[fx.Node, object, object]]:
    """Yield every node ``a.data = b``, and the values of ``a`` and ``b`` (None for nodes that are not inputs)."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True))
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", node.target) in _SETS and len(node.args) == 2:
            one, other = node.args
            yield node, given.get(one), given.get(other)


def state_beside_parameters(inputs: Sequence[fx.Node], values: Sequence[object]) -> set[str]:
    """Return the names of inputs whose owner also holds a tensor with a parameter's memory."""
    parameters = {_memory(v) for v in values if isinstance(v, torch.nn.Parameter)} - {None}
    bases = {node.name: getattr(getattr(node, "_dynamo_source", None), "base", None) for node in inputs}
    holders: list[object] = [
        bases[node.name]
        for node, value in zip(inputs, values, strict=True)
        if not isinstance(value, torch.nn.Parameter) and _memory(value) in parameters
    ]
    return {name for name, base in bases.items() if base is not None and base in holders}


def _memory(tensor: object) -> Hashable:
    """Return a key of the memory and layout of ``tensor``, or None if the memory is unknown."""
    # Fake tensors, wrapper subclasses and empty tensors have no memory of their own.
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride()
