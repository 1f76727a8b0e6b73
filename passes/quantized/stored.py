"""Weights that are stored in numbers of a byte or less, and what dequantizes them."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.expr import is_foreign
from mla_compile.passes.ir.graph import is_tensor, val
from mla_compile.passes.ir.walk import reachable


def stored_leaves(weight: fx.Node) -> list[fx.Node]:
    """The inputs that ``weight`` is computed from, where one of them stores narrow numbers; else nothing."""
    tensors = [n for n in made_of(weight) if n.op in ("placeholder", "get_attr") or n.target is getattr]
    return tensors if any(is_narrow(val(n).dtype) or _is_packed(val(n)) for n in tensors) else []


def made_of(weight: fx.Node) -> list[fx.Node]:
    """``weight`` and the tensors behind it; those that a tensor subclass is made of are inputs."""
    inputs = reachable([weight], lambda n: () if n.target is getattr else n.all_input_nodes)
    return [n for n in inputs if is_tensor(n)]


def dequantized_by_library(weight: fx.Node) -> bool:
    """Whether an operator that no compiler looks into is among those that compute ``weight``."""
    return any(n.op == "call_function" and is_foreign(n.target) for n in made_of(weight))


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether its numbers take a byte or less."""
    return dtype.itemsize == 1 and dtype != torch.bool


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether it is a matrix of integers: several narrow numbers in each."""
    return tensor.dtype in (torch.int32, torch.int64) and tensor.dim() > 1
