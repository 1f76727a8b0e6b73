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
from mla_compile.passes.ir.operators import Assign, Broadcast, Dropout, Slice, Write, WriteOne, decode
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_CHECKS = {aten._assert_tensor_metadata}


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
    how = decode(node)
    if not isinstance(how, Assign) or not all(_writes(node, decode(user)) for user in node.users):
        return False
    old, new = val(how.x), val(node)
    alike = old.dim() == new.dim() and old.dtype == new.dtype and old.device == new.device
    return alike and all(map(same, shape(how.x), shape(node)))


def _writes(x: fx.Node, user: object) -> bool:
    return isinstance(user, (Write, WriteOne)) and user.x is x and user.base is not x


def _is_empty(node: fx.Node) -> bool:
    """An operator that returns its input as it is, and whose users only compute with it."""
    if any(user.op == "output" for user in node.users):
        return False
    if packet(node) in (aten.detach, aten.alias):
        return True
    how = decode(node)
    if isinstance(how, Dropout):
        return not how.active and packet(node) is aten.dropout
    if packet(node) not in (aten.expand, aten.slice) or not isinstance(how, (Broadcast, Slice)):
        return False
    old, new = shape(how.x), shape(node)
    if len(old) != len(new) or not all(same(a, b) for a, b in zip(old, new, strict=True)):
        return False
    return bool(val(how.x).stride() == val(node).stride())
