"""One symbol for the lengths of caches that grow together.

Dynamo gives the length of each layer's cache a symbol of its own, and capture and passes compare them with each other
again and again.
"""

from __future__ import annotations

import torch
from torch import fx


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
