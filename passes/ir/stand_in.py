"""Plain nodes that stand for quantized ones while the passes reason about a graph.

A quantized product is a linear map that rounds, computed by operators that say nothing of the map. Beside such a node
stands another that says it in plain operators (``linear`` with the dequantized weight), and everybody reads that one:

    y = gemm_4bit(x, packed, ...)      ->      y; plain = stand_in(linear(x, dequantize(packed, ...))), read for y

The original waits without a reader. When everything is decided, :func:`settle` puts it back where it is still needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

STANDS_FOR = "mla_compile_stands_for"
"""Key in the metadata of a stand-in: the name of the node it stands for, as it was."""

WAITS = "mla_compile_waits"
"""Key in the metadata of the node that a stand-in stands for: its name, as it was. It is not dead code."""

DROPPED = "mla_compile_dropped"
"""Key in the metadata of a stand-in whose original rounds rows: to what, for people."""


BARRED = "mla_compile_barred"
"""Key in the metadata of a node that may have no stand-in, because it rounds rows: to what, for people."""


def stand_in(plain: torch.Tensor) -> torch.Tensor:
    """The operator of a stand-in: ``plain`` itself."""
    return plain


def waits(node: fx.Node) -> bool:
    """Whether ``node`` has a stand-in."""
    return WAITS in node.meta


def original_of(node: fx.Node) -> fx.Node | None:
    """The node that ``node`` stands for; None where it is no stand-in."""
    name = node.meta.get(STANDS_FOR)
    if name is None:
        return None
    found: fx.Node = next(n for n in node.graph.nodes if n.meta.get(WAITS) == name)
    return found


def settle(graph: fx.Graph) -> int:
    """Puts every original back whose stand-in is still read; returns how many. The others are dead code from now on."""
    originals: Mapping[str, fx.Node] = {n.meta.pop(WAITS): n for n in graph.nodes if waits(n)}
    settled = 0
    for node in [n for n in graph.nodes if STANDS_FOR in n.meta]:
        settled += bool(node.users)
        node.replace_all_uses_with(originals[node.meta[STANDS_FOR]])
        graph.erase_node(node)
    return settled
