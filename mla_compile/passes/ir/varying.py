"""Along which axes the values of a tensor differ, as told by how it was broadcast."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import is_tensor, shape
from mla_compile.passes.ir.moves import Copy, Fill, Rearrange
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same

_DEPTH = 16
"""How many operators back a broadcast is looked for."""


def varying(node: fx.Node, depth: int = _DEPTH) -> frozenset[int]:
    """Return the axes of ``node`` along which its values may differ."""
    own = shape(node)
    wide = (k for k, n in enumerate(own) if not same(n, 1))
    how, tags = decode(node), getattr(node.target, "tags", ())
    if isinstance(how, Fill):
        return frozenset()
    if not depth:
        return frozenset(wide)
    if isinstance(how, Copy):
        return varying(how.x, depth - 1)
    if isinstance(how, Rearrange) and how.map is not None:
        inner, read = varying(how.x, depth - 1), how.map.read_along
        return frozenset(k for k in wide if not inner.isdisjoint(read(k)))
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        read_from = [n for n in node.all_input_nodes if is_tensor(n)]
        return frozenset(k + len(own) - len(shape(n)) for n in read_from for k in varying(n, depth - 1))
    return frozenset(wide)
