"""The tensors that a call makes, views left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """Notes what operators make, also those of code that Dynamo compiled before.

    Attributes:
        tensors: the operator and the shape of each tensor in new memory, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[str, tuple[int, ...]]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_memory(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = (x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and _memory(x) not in given)
        self.tensors += [(str(func), tuple(x.shape)) for x in made]
        return out

    def with_axes(self, *sets: frozenset[int]) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors that have an axis of each set, different ones."""
        return [one for one in self.tensors if _has(one[1], sets)]


def _has(shape: tuple[int, ...], sets: Sequence[frozenset[int]]) -> bool:
    if not sets:
        return True
    first, *rest = sets
    return any(n in first and _has((*shape[:k], *shape[k + 1 :]), rest) for k, n in enumerate(shape))


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
