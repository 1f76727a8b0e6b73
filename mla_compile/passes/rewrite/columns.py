"""Read columns of a joined query directly from the part that holds them.

Before: ``query = cat([nope, rope], -1)`` by the model, and ``slice(query, -1, 0, N)`` by a rewrite. After: ``nope``.

Models join the rotated and the unrotated columns of the query. The absorbed form uses each part separately and does not
need the join. A downstream compiler does not remove the join. Its code tests for every column which part holds the
column.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import OURS, Builder, restride, val
from mla_compile.passes.ir.moves import Join, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import size
from mla_compile.passes.ir.walk import remove_dead_code


def read_parts(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Let slices that rewrites added read a joined part, if this part holds the slice; return how many."""
    done = 0
    for node in list(graph.nodes):
        how = decode(node) if OURS in node.meta else None
        if not isinstance(how, Slice) or not how.taken or how.taken.step != 1:
            continue
        part, taken = _part(how.x, how.dim, how.taken)
        if part is how.x:
            continue
        new = part
        if size(val(part).shape[how.dim]) != len(taken):
            new = Builder(node, fake_mode).call(torch.ops.aten.slice.Tensor, part, how.dim, taken.start, taken.stop)
        readers = list(node.users)
        node.replace_all_uses_with(new)
        for reader in readers:
            restride(reader, fake_mode)
        done += 1
    remove_dead_code(graph)
    return done


def _part(x: fx.Node, dim: int, taken: range) -> tuple[fx.Node, range]:
    """Return the innermost joined part that holds all positions ``taken``, and the range of these positions in it."""
    how = decode(x)
    if not isinstance(how, Join) or how.dim != dim:
        return x, taken
    start = 0
    for part in how.parts:
        length = size(val(part).shape[dim])
        if not isinstance(length, int):
            break
        if start <= taken.start and taken.stop <= start + length:
            same = val(part).dtype == val(x).dtype  # a join converts to the widest dtype of its parts
            return _part(part, dim, range(taken.start - start, taken.stop - start)) if same else (x, taken)
        start += length
    return x, taken
