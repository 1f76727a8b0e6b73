"""Plain nodes that stand for operators of libraries while the passes reason about a graph.

A quantized product is a linear map that rounds, and FlashAttention an attention, computed by operators that say nothing
of it. Beside such a node stands another that says it in plain operators (``linear`` with the dequantized weight,
``scaled_dot_product_attention``), and everybody reads that one:

    y = gemm_4bit(x, packed, ...)      ->      y; plain = stand_in(linear(x, dequantize(packed, ...))), read for y

The original waits without a reader. When everything is decided, :func:`settle` puts it back where it is still needed:
where a product is still read, and where an attention was not rewritten.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

STANDS_FOR = "mla_compile_stands_for"
"""Key in the metadata of a stand-in: the name of the node it stands for, as it was."""

WAITS = "mla_compile_waits"
"""Key in the metadata of the node that a stand-in stands for: its name, as it was. It is not dead code."""

DROPPED = "mla_compile_dropped"
"""Key in the metadata of a stand-in whose original rounds rows: to what, for people."""

CORE = "mla_compile_core"
"""Key in the metadata of a stand-in for an attention: the names of the nodes that a rewrite of it would replace."""

BARRED = "mla_compile_barred"
"""Key in the metadata of a node that may have no stand-in, because it rounds rows: to what, for people."""

REFUSED = "mla_compile_refused"
"""Key in the metadata of an attention operator of a library that is no plain attention: a code, and why in words."""


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
    """Puts every original back whose stand-in is still read; returns how many. The others are dead code from now on.

    A stand-in for an attention is read in any case: there the original is put back unless a rewrite took its place.
    """
    originals: Mapping[str, fx.Node] = {n.meta.pop(WAITS): n for n in graph.nodes if waits(n)}
    names = {n.name for n in graph.nodes}
    settled = 0
    for node in [n for n in graph.nodes if STANDS_FOR in n.meta]:
        rewritten = not names.issuperset(node.meta.get(CORE, ()))
        settled += bool(node.users) and not rewritten
        original = originals[node.meta[STANDS_FOR]]
        node.replace_all_uses_with(node.all_input_nodes[0] if rewritten else original)
        graph.erase_node(node)
        if rewritten:
            _erase(original)
    return settled


def _erase(node: fx.Node) -> None:
    """Erases ``node`` and the call that only it reads: torch takes some attentions for operators that draw numbers."""
    reads = node.all_input_nodes if node.target is operator.getitem else []
    node.graph.erase_node(node)
    for call in reads:
        for other in [n for n in call.users if not n.users]:
            node.graph.erase_node(other)
        if not call.users:
            node.graph.erase_node(call)
