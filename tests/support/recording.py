"""CUDA graphs without a GPU: the operators of a recording run again over the same memory, and nothing may wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {
    aten.item, aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten._unique2, aten.equal,
}  # fmt: skip
"""Operators that wait for the device, or whose result has a size that only the data tell."""


class Graph:
    """As ``torch.cuda.CUDAGraph``: what was recorded reads and writes where it did then, and only when replayed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, places in self.calls:
            for place, value in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, _tensors(result)))
        return result


@contextmanager
def record(graph: Graph, **_: Any) -> Iterator[None]:
    """Records what runs meanwhile. Of a device nothing would have run: what it made holds no numbers afterwards."""
    with _Recorder(graph):
        yield
    given = {x.untyped_storage().data_ptr() for _, args, kwargs, _ in graph.calls for x in _tensors((args, kwargs))}
    for *_, places in graph.calls:
        for place in places:
            if place.is_floating_point() and place.untyped_storage().data_ptr() not in given:
                place.fill_(torch.nan)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
