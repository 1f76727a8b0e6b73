"""Tell hidden states from a latent: hidden states come from a residual connection ``x + f(x)`` or a convolution.

A latent is projected from hidden states, and a cache should hold the latent. If K and V are projected from the hidden
states themselves, the attention is plain multi-head attention. Widths do not distinguish a latent from hidden states,
because the latent may be wider.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mla_compile.passes.ir.graph import elements_hint, is_tensor, packet, whole_rows
from mla_compile.passes.ir.operators import CONTRACTIONS
from mla_compile.passes.ir.walk import leads_to, reachable

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d)


def shortcut(node: fx.Node) -> fx.Node | None:
    """Return ``x`` if ``node`` is ``x + f(x)``, else None.

    A rotation ``x cos + rotated(x) sin`` is a sum as well, but neither term is computed from the other.
    """
    inputs = node.all_input_nodes
    if packet(node) is not aten.add or len(inputs) != 2:
        return None
    # `sorted` returns graph order. Only the later node can be computed from the earlier node.
    first, second = sorted(inputs)
    return first if is_tensor(first) and leads_to(first, second) else None


def is_hidden_state(rows: fx.Node) -> bool:
    """Whether ``rows`` come from a residual connection or a convolution, without a projection in between."""
    rows = whole_rows(rows)
    count = elements_hint(rows)

    def same_rows(node: fx.Node) -> Iterable[fx.Node]:
        # A norm or a gate keeps the number of elements. Weights, means and variances have a different number.
        inputs = () if packet(node) in CONTRACTIONS else node.all_input_nodes
        return (n for n in inputs if is_tensor(n) and elements_hint(n) == count)

    return any(packet(n) in _CONVOLUTIONS or shortcut(n) is not None for n in reachable([rows], same_rows))
