"""Weights that are stored in a byte or less per value, and the operators that dequantize them."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.expr import is_foreign
from mla_compile.passes.ir.graph import is_tensor, val
from mla_compile.passes.ir.walk import reachable


def stored_leaves(weight: fx.Node) -> list[fx.Node]:
    """Return the stored tensors from which ``weight`` is computed; an empty list if none holds narrow numbers."""
    tensors = [n for n in made_of(weight) if n.op in ("placeholder", "get_attr") or n.target is getattr]
    return tensors if any(is_narrow(val(n).dtype) or _is_packed(val(n)) for n in tensors) else []


def made_of(weight: fx.Node) -> list[fx.Node]:
    """Return ``weight`` and the tensors it is computed from, down to inputs and to the parts of tensor subclasses."""
    inputs = reachable([weight], lambda n: () if n.target is getattr else n.all_input_nodes)
    return [n for n in inputs if is_tensor(n)]


def dequantized_by_library(weight: fx.Node) -> bool:
    """Whether an operator that is opaque to compilers takes part in computing ``weight``."""
    return any(n.op == "call_function" and is_foreign(n.target) for n in made_of(weight))


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a number of this dtype takes a byte or less; False for booleans."""
    return dtype.itemsize == 1 and dtype != torch.bool


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a matrix of integers, each of which packs several narrow numbers."""
    return tensor.dtype in (torch.int32, torch.int64) and tensor.dim() > 1
