"""Plain nodes that stand in for library operators while the passes reason about a graph.

A quantized product is a linear map that rounds, and FlashAttention is an attention, but their operators do not show
this. A stand-in expresses such a node in plain operators (``linear`` with the dequantized weight,
``scaled_dot_product_attention``), and all readers of the original read the stand-in:

    y = gemm_4bit(x, packed, ...)   ->   y; plain = stand_in(linear(x, dequantize(packed, ...))), read instead of y

The original stays in the graph without readers. After all decisions, :func:`settle` restores the originals that are
still needed: products that are still read, and attentions that were not rewritten.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

STANDS_FOR = "mla_compile_stands_for"
"""Metadata key of a stand-in. It holds the name that the original node had."""

WAITS = "mla_compile_waits"
"""Metadata key of a node that has a stand-in. It holds the node's original name. The node is not dead code."""

DROPPED = "mla_compile_dropped"
"""Metadata key of a stand-in whose original rounds rows. The value names the format of the rounded rows."""

CORE = "mla_compile_core"
"""Metadata key of a stand-in for an attention.

It holds the names of the nodes that a rewrite of the attention would replace.
"""

BARRED = "mla_compile_barred"
"""Metadata key of a node that must not get a stand-in, because the node rounds rows.

The value names the format of the rounded rows.
"""

REFUSED = "mla_compile_refused"
"""Metadata key of a library's attention operator that is not a plain attention.

It holds a code and the reason in words.
"""


def stand_in(plain: torch.Tensor) -> torch.Tensor:
    """Return ``plain`` unchanged. This function is the operator of a stand-in node."""
    return plain


def waits(node: fx.Node) -> bool:
    """Whether ``node`` has a stand-in."""
    return WAITS in node.meta


def original_of(node: fx.Node) -> fx.Node | None:
    """Return the original of the stand-in ``node``; None if ``node`` is not a stand-in."""
    name = node.meta.get(STANDS_FOR)
    if name is None:
        return None
    found: fx.Node = next(n for n in node.graph.nodes if n.meta.get(WAITS) == name)
    return found


def settle(graph: fx.Graph) -> int:
    """Restore every original whose stand-in is still read, and return how many were restored.

    If a stand-in is not read, its original becomes dead code. If an attention was rewritten, its original is erased.
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
    """Erase ``node``. If no other result of its call is read, also erase the call.

    Dead-code removal would keep the call, because torch treats attentions as random.
    """
    reads = node.all_input_nodes if node.target is operator.getitem else []
    node.graph.erase_node(node)
    for call in reads:
        for other in [n for n in call.users if not n.users]:
            node.graph.erase_node(other)
        if not call.users:
            node.graph.erase_node(call)
