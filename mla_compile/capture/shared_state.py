"""Weights that a module holds twice: as a parameter, and in an object beside it that is no module.

That is how bitsandbytes keeps int8 weights: ``forward`` computes with ``state.CB`` and ``state.SCB``, and then writes
``weight.data = state.CB``, which is where the parameter lies already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def drop_idle_sets(gm: fx.GraphModule, values: Sequence[object]) -> None:
    """Removes every ``a.set_(b)`` from ``gm`` where ``a`` is that memory already; ``values``: of its inputs."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True))
    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", node.target) != "set_" or len(node.args) != 2:
            continue
        one, other = (given.get(n) for n in node.args)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _same_memory(one, other)):
            continue
        for user in list(node.users):  # Dynamo counts such a write back: it is none to whoever watches the version
            user.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(user)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()


def state_beside_parameters(inputs: Sequence[fx.Node], values: Sequence[object]) -> set[str]:
    """The names of inputs that objects hold of which one tensor lies in the memory of a parameter."""
    parameters = [v for v in values if isinstance(v, torch.nn.Parameter)]
    bases = {node.name: getattr(getattr(node, "_dynamo_source", None), "base", None) for node in inputs}
    holders: list[Any] = [
        bases[node.name]
        for node, value in zip(inputs, values, strict=True)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and any(_same_memory(value, parameter) for parameter in parameters)
    ]
    return {name for name, base in bases.items() if base is not None and base in holders}


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) or a.is_meta or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
