"""What tells a model's hidden states from a latent: residual connections, ``h = x + f(x)``, and convolutions."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import bytes_hint, is_tensor, packet, val, whole_rows
from mla_compile.passes.ir.operators import CONTRACTIONS

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d)


def shortcut(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is ``x + f(x)``. The halves of a rotation are no such sum: neither is made of the other."""
    inputs = node.all_input_nodes
    if packet(node) is not aten.add or len(inputs) != 2:
        return None
    first, second = sorted(inputs)
    return first if is_tensor(first) and _leads_to(first, second) else None


def is_hidden_state(rows: fx.Node) -> bool:
    """Whether ``rows`` are what a residual connection or a convolution made, normed perhaps, not projected since."""
    rows = whole_rows(rows)
    count = _elements(rows)
    queue, seen = [rows], {rows}
    while queue:
        node = queue.pop()
        if packet(node) in _CONVOLUTIONS or shortcut(node) is not None:
            return True
        if packet(node) in CONTRACTIONS:
            continue
        for source in node.all_input_nodes:
            if source not in seen and is_tensor(source) and _elements(source) == count:
                seen.add(source)
                queue.append(source)
    return False


def _elements(node: fx.Node) -> int:
    return bytes_hint(node) // val(node).element_size()


def _leads_to(first: fx.Node, last: fx.Node) -> bool:
    """Whether ``last`` is computed from ``first``; looks at no node before ``first``."""
    queue, seen = [last], {last}
    while queue:
        for node in queue.pop().all_input_nodes:
            if node is first:
                return True
            if first < node and node not in seen:
                seen.add(node)
                queue.append(node)
    return False
