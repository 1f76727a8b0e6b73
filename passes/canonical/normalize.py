"""Many spellings, one graph: what carries no meaning for the analysis is removed before it starts.

Before::

    _assert_tensor_metadata(x, None, None, float32)      # a check that tracing left behind
    y = clone(x); z = _to_copy(y, dtype=<dtype of y>)

After: the users of ``y`` and ``z`` read ``x``; the check is gone. The checks were true when the graph was traced and
guard nothing that Dynamo's own guards do not. Copies whose value escapes (outputs, inputs written in place) stay.

Before: ``new = slice_scatter(k, copy(part_of_k, x), dim, a, b)``, which is what ``k[..., a:b] = x`` becomes

After: ``new = slice_scatter(k, x, dim, a, b)``, which reads nothing of what is overwritten
"""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, packet, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_CHECKS = {aten._assert_tensor_metadata}
_SCATTERS = {aten.slice_scatter, aten.select_scatter}


def normalize(graph: fx.Graph) -> int:
    """Removes checks and empty operators; returns how many."""
    removed = 0
    for node in list(graph.nodes):
        if packet(node) in _CHECKS:
            graph.erase_node(node)
            removed += 1
        elif _is_empty(node):
            node.replace_all_uses_with(args_of(node)[0])
            graph.erase_node(node)
            removed += 1
        elif _is_write_of_all(node):
            node.replace_all_uses_with(args_of(node)[1])
            graph.erase_node(node)
            removed += 1
    return removed


def _is_write_of_all(node: fx.Node) -> bool:
    """``copy(part, x)`` that changes nothing of ``x``, on its way into a larger tensor."""
    if packet(node) is not aten.copy or not isinstance(x := args_of(node)[1], fx.Node):
        return False
    if any(packet(user) not in _SCATTERS or user.args[1:2] != (node,) or user.args[0] is node for user in node.users):
        return False
    old, new = val(x), val(node)
    alike = old.dim() == new.dim() and old.dtype == new.dtype and old.device == new.device
    return alike and all(map(same, shape(x), shape(node)))


def _is_empty(node: fx.Node) -> bool:
    """An operator that returns its input as it is, and whose users only compute with it."""
    if any(user.op == "output" for user in node.users):
        return False
    op = packet(node)
    if op is aten.dropout:
        return not args_of(node)[2] or args_of(node)[1] == 0
    if op in (aten.detach, aten.alias):
        return True
    if op in (aten.expand, aten.slice) and isinstance(args_of(node)[0], fx.Node):
        old, new = shape(args_of(node)[0]), shape(node)
        if len(old) != len(new) or not all(same(a, b) for a, b in zip(old, new, strict=True)):
            return False
        return bool(val(args_of(node)[0]).stride() == val(node).stride())
    return False
