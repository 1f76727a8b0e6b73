"""Rewrite a scatter of whole rows as a write at positions.

Before: ``new = scatter(k, dim, expand(at[:, None], x's sizes), x)``, in which all numbers of a token share a position

After: ``new = index_copy(k, dim, at, x)``
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, replace_each, shape
from mla_compile.passes.ir.moves import Rearrange
from mla_compile.passes.ir.operators import decode, varying, whole_scatter

aten = torch.ops.aten


def read_scatters(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Rewrite scatters that send whole rows to positions; return how many."""

    def write(node: fx.Node) -> fx.Node | None:
        scatter = whole_scatter(node)
        if scatter is None or not varying(scatter[2]) <= {scatter[1]}:
            return None
        base, dim, index, x = scatter
        builder = Builder(node, fake_mode)
        return builder.call(aten.index_copy.default, base, dim, _along(builder, index, dim), x)

    return replace_each(graph.find_nodes(op="call_function", target=aten.scatter.src), write)


def _along(builder: Builder, node: fx.Node, dim: int) -> fx.Node:
    """Return the values of ``node`` along axis ``dim``. All other axes are constant."""
    while isinstance(how := decode(node), Rearrange) and how.map is not None:
        read = how.map.read_along(dim)
        if len(read) != 1 or how.map.kept(read[0]) != dim:
            break
        node, dim = how.x, read[0]
    for k in reversed(range(len(shape(node)))):
        if k != dim:
            node = builder.call(aten.select.int, node, k, 0)
    return node
