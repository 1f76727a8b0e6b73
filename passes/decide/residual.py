"""Telling hidden states from a latent, by the residual connection ``h = x + f(x)`` or the convolution behind them.

A latent is projected from hidden states, and is what a cache should hold. K and V that are projected from the hidden
states themselves are plain multi-head attention. Widths cannot tell the two apart: a latent may be the wider one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mla_compile.passes.ir.graph import bytes_hint, is_tensor, packet, val, whole_rows
from mla_compile.passes.ir.operators import CONTRACTIONS
from mla_compile.passes.ir.walk import leads_to, reachable

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d)


def shortcut(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is ``x + f(x)``, else None.

    A rotation ``x cos + rotated(x) sin`` is a sum as well, but neither of its terms is computed from the other.
    """
    inputs = node.all_input_nodes
    if packet(node) is not aten.add or len(inputs) != 2:
        return None
    # Nodes compare by their place in the graph: only the earlier one can be what the later is computed from.
    first, second = sorted(inputs)
    return first if is_tensor(first) and leads_to(first, second) else None


def is_hidden_state(rows: fx.Node) -> bool:
    """Whether ``rows`` come out of a residual connection or a convolution, perhaps through a norm, unprojected."""
    rows = whole_rows(rows)
    count = _elements(rows)

    def same_rows(node: fx.Node) -> Iterable[fx.Node]:
        # A norm or a gate keeps the number of elements; its weights, means and variances have others.
        inputs = () if packet(node) in CONTRACTIONS else node.all_input_nodes
        return (n for n in inputs if is_tensor(n) and _elements(n) == count)

    return any(packet(n) in _CONVOLUTIONS or shortcut(n) is not None for n in reachable([rows], same_rows))


def _elements(node: fx.Node) -> int:
    return bytes_hint(node) // val(node).element_size()
