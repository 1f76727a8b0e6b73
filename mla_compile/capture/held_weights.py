"""Finds weights that modules hold in plain attributes, as tensors that are neither parameters nor buffers.

For example, serving code splits an up-projection once after loading and keeps the halves as attributes
(``self.w_uk = w[:, :N]``). A cache may also be an attribute. Only the use in the graph tells weights and caches apart.
A weight is only multiplied by rows of this call, as a matrix or feature by feature. A cache is written to, concatenated
with new rows, returned, read by an attention, or multiplied by queries before a softmax and by probabilities after the
softmax.

Like a parameter, a held weight is read anew in every call. Values that were computed from a held weight ahead of time
are checked against the attribute's tensor in each call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx
from torch._dynamo.source import NNModuleSource
from torch._subclasses.fake_tensor import FakeTensor

from mla_compile.passes.ir.graph import is_tensor, packet, val
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.walk import nearest, weight_nodes

aten = torch.ops.aten

_SOFTMAX = {aten.softmax, aten._softmax, aten._safe_softmax, aten.exp}
"""The operators that turn scores into probabilities. ``exp`` covers a softmax that is written out."""


def is_held(source: object) -> bool:
    """Whether Dynamo reached an input through a module, for example as an attribute, or in a list in an attribute."""
    while source is not None:
        if isinstance(source, NNModuleSource):
            return True
        source = getattr(source, "base", None)
    return False


def held_weights(graph: fx.Graph, known: Collection[str], held: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the inputs in ``held`` that are weights. ``known`` names inputs that certainly are weights.

    ``held`` has inputs of fixed size that the graph does not write to. (A graph that writes to such a tensor through
    another input cannot be made functional.)
    """
    plain = {name for name, value in held.items() if isinstance(value, FakeTensor) or type(value) is torch.Tensor}
    if not plain:
        return set()
    constant = weight_nodes(graph, {*known, *plain})
    return {n.name for n in graph.find_nodes(op="placeholder") if n.name in plain and _is_weight(n, constant)}


def _is_weight(node: fx.Node, constant: Collection[fx.Node]) -> bool:
    readers = list(_readers(node, constant))
    return bool(readers) and all(_projects(one, constant) for one in readers)


def _readers(node: fx.Node, constant: Collection[fx.Node]) -> Iterable[fx.Node]:
    """Return the nodes outside ``constant`` that read ``node``, either directly or through nodes in ``constant``."""
    found: dict[fx.Node, None] = {}
    queue = [node]
    for one in queue:
        for user in one.users:
            if user not in constant:
                found[user] = None
            elif user not in queue:
                queue.append(user)
    return found


def _projects(node: fx.Node, constant: Collection[fx.Node]) -> bool:
    """Whether ``node`` multiplies rows of this call by a weight, and neither computes scores nor uses probabilities."""
    if not (is_contraction(node) or _scales_features(node, constant)):
        return False
    scores, _ = nearest(node, lambda n: n.users, _is_softmax, is_contraction)
    return not scores and not any(_weigh(n) for n in node.all_input_nodes if n not in constant)


def _scales_features(node: fx.Node, constant: Collection[fx.Node]) -> bool:
    """Whether ``node`` multiplies every row by the same vector, feature by feature."""
    if packet(node) is not aten.mul:
        return False
    held = [one for one in node.all_input_nodes if one in constant]
    return all(is_tensor(one) and 1 < val(one).numel() == val(one).shape[-1] for one in held)


def _weigh(rows: fx.Node) -> bool:
    """Whether an operand may hold probabilities: a softmax is upstream, with no product in between."""
    if _is_softmax(rows) or is_contraction(rows):
        return _is_softmax(rows)
    return bool(nearest(rows, lambda n: n.all_input_nodes, _is_softmax, is_contraction)[0])


def _is_softmax(node: fx.Node) -> bool:
    return packet(node) in _SOFTMAX
