"""One symbol for the lengths of caches that grow together.

Dynamo gives the length of each layer's cache a symbol of its own, and capture and passes compare them with each other
again and again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from mla_compile.passes.ir.graph import argument


def share_lengths(gm: fx.GraphModule) -> None:
    """Guards that sizes which are equal in this call stay equal: from then on they have one symbol.

    Asked of floating-point inputs of one rank, along one axis. Where such sizes part later, as that of a full window
    does from that of the whole text, the guard fails once, and the graph is compiled with a symbol for each.
    """
    first: dict[tuple[int, int, int], torch.SymInt] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                bool(first.setdefault((value.dim(), axis, size.node.hint), size) == size)  # true, and guarded
    # Keys and values of an attention are as long as each other, or it fails; torch's meta kernel does not say so.
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        key, value = (_length(argument(node, i, name)) for i, name in ((1, "key"), (2, "value")))
        if key is not None and value is not None and _hint(key) == _hint(value):
            bool(key == value)


def _length(rows: Any) -> int | torch.SymInt | None:
    """The length of keys or values, where it is known in this call."""
    value = rows.meta.get("example_value") if isinstance(rows, fx.Node) else None
    length = value.shape[-2] if isinstance(value, torch.Tensor) and value.dim() > 1 else None
    return length if isinstance(length, int) or (length is not None and length.node.has_hint()) else None


def _hint(length: int | torch.SymInt) -> int:
    return length if isinstance(length, int) else int(length.node.hint)
