"""Reads the arguments that an operator may write into from a functionalized call.

The call receives whole tensors, the *bases*. An argument that may be written is given by the index of a base, and by
sizes, strides and a memory offset within this base. If these numbers describe a permuted slice of a dense base, the
argument is read as the slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, val

aten = torch.ops.aten


def functionalized(call: fx.Node, fake_mode: FakeTensorMode | None) -> Mapping[str, object]:
    """Return the arguments of the operator that ``call`` runs, by name. Views of bases are added before ``call``.

    Raises ``ValueError`` with the name of an argument that is not a permuted slice of a dense base.
    """
    told: dict[str, Any] = {k: v for k, v in call.kwargs.items() if not k.startswith("_")}
    bases: Any = call.kwargs.get("_all_bases", ())
    for key, base in call.kwargs.items():
        if not key.endswith("_base_index"):
            continue
        name = key[1 : -len("_base_index")]
        view = {k[len(name) + 2 :]: v for k, v in call.kwargs.items() if k.startswith(f"_{name}_") and k != key}
        told[name] = None if base is None else _view(call, bases[base], view, name, fake_mode)
    return told


def _view(
    call: fx.Node, base: fx.Node, told: Mapping[str, Any], name: str, fake_mode: FakeTensorMode | None
) -> fx.Node:
    if not told or told.get("alias"):
        return base
    builder = Builder(call, fake_mode)
    if "slice_dim" in told:
        return builder.call(aten.slice.Tensor, base, told["slice_dim"], told["slice_start"], told["slice_end"])
    sizes: tuple[int, ...] = tuple(told.get("size", ()))
    strides: tuple[int, ...] = tuple(told.get("stride", ()))
    offset: Any = told.get("storage_offset")
    if not sizes or not all(isinstance(n, int) for n in (*sizes, *strides, offset)) or not _is_dense(val(base)):
        raise ValueError(name)
    node = _cut_out(builder, base, list(zip(sizes, strides, strict=True)), offset)
    made = None if node is None else val(node)
    if made is None or tuple(made.shape) != sizes or made.storage_offset() != offset or node is None:
        raise ValueError(name)
    if any(n > 1 and a != b for n, a, b in zip(sizes, made.stride(), strides, strict=True)):
        raise ValueError(name)
    return node


def _is_dense(x: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in x.shape) and x.is_contiguous() and x.storage_offset() == 0


def _cut_out(builder: Builder, base: fx.Node, axes: list[tuple[int, int]], offset: int) -> fx.Node | None:
    """Return the view of the dense ``base`` with ``axes`` (size, stride); None if it is not a permuted slice.

    A position in memory is read like a number with several digits. The strides, from the largest to the smallest, are
    the place values of the digits. The view takes a range of each digit.
    """
    order = sorted((k for k, (n, _) in enumerate(axes) if n > 1), key=lambda k: axes[k][1], reverse=True)
    values = [math.prod(val(base).shape), *(axes[k][1] for k in order), 1]
    if any(low <= 0 or high % low for high, low in pairwise(values)):
        return None
    node = builder.call(aten.view.default, base, [high // low for high, low in pairwise(values)])
    for digit, value in enumerate(values[1:]):
        start, offset = divmod(offset, value)
        length = axes[order[digit]][0] if digit < len(order) else 1
        node = builder.call(aten.slice.Tensor, node, digit, start, start + length)
    # The last digit has size 1 by now and is squeezed. Then the argument's own axes of size 1 are inserted.
    node = builder.call(aten.squeeze.dim, node, len(order))
    node = builder.call(aten.permute.default, node, [order.index(k) for k in sorted(order)])
    for k, (n, _) in enumerate(axes):
        node = node if n > 1 else builder.call(aten.unsqueeze.default, node, k)
    return node
