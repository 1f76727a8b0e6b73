"""Keeps traces of matrix products from specialising on a dynamic size that is 1.

A batched product reshapes its operands, and an operand's layout decides whether it can be reshaped without a copy. A
transposed operand is contiguous with one column but not with two, so a step with one row in the cache would need a
separate graph. Operands are therefore copied, because a copy is contiguous for all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

_PRODUCT = torch.ops.aten.matmul.default


@contextmanager
def of_any_size() -> Iterator[None]:
    """In traces of batched ``matmul`` within this context, copy operands with a symbolic size of 1."""
    product: Any = _PRODUCT
    given = product.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def matmul(a: torch.Tensor, b: torch.Tensor, **options: Any) -> Any:
        if a.dim() > 2 and b.dim() > 2 and (_of_one(a) or _of_one(b)):
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            a, b = (_copied(x.expand(*batch, *x.shape[-2:])) if _of_one(x) else x for x in (a, b))
        return given(a, b, **options)

    _set(product, matmul)
    try:
        yield
    finally:
        _set(product, given)


def _set(product: Any, kernel: object) -> None:
    product.py_kernels[DispatchKey.CompositeImplicitAutograd] = kernel
    product._dispatch_cache.clear()


def _of_one(x: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) and n.node.has_hint() and n.node.hint == 1 for n in x.shape)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
