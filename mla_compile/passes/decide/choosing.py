"""The cost of choosing the keys of a sparse attention. The indexer reads every cached token.

A report shows this cost because it grows with the context. The FLOPs of the indexer's products over keys are counted,
and the bytes of rows that these products read. If each head has a product that is written to memory, the bytes of the
results are added.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import fx

from mla_compile.passes.attention.chosen import ranked
from mla_compile.passes.attention.indexer import with_keys
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import args_of, bytes_hint, packet, shape, val
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.moves import Copy
from mla_compile.passes.ir.operators import behind
from mla_compile.passes.ir.sizes import Size, hint, same, size
from mla_compile.passes.ir.walk import reachable
from mla_compile.passes.sources.records import AbsorbPlan


class Choosing(NamedTuple):
    """The cost for one sequence and query, per token of the context."""

    scores: fx.Node  # one per cached token; the largest are chosen
    flops: int
    bytes: int
    fused: bool  # no product of a head goes through memory


def choosing(plan: AbsorbPlan) -> Choosing | None:
    """Return the cost of choosing the keys; None if the scores of the keys are not found (they may be inputs)."""
    chosen = plan.visible.chosen
    found = None if chosen is None else ranked(chosen, some=True)
    if chosen is None or found is None:
        return None
    T = axis_size(chosen.keys)
    scores = found[0]
    calls = math.prod(_sizes(scores)) // max(1, _length(scores, T))  # sequences times queries
    tokens = max(1, _length(scores, T))
    flops = moved = 0
    rows: dict[fx.Node, None] = {}
    for node in reachable([scores], lambda n: with_keys(n, T)):
        if packet(node) is torch.ops.mla_compile.index_scores:
            query, keys = args_of(node)[:2]
            B, S, J, D = _sizes(query)
            flops += 2 * B * S * J * (D + 1) * _length(keys, T)
            rows[behind(keys, Copy)[-1]] = None
        if (labelled := _product(node)) is None:
            continue
        if math.prod(_sizes(node)) > calls * tokens:
            moved += 2 * bytes_hint(node)
        left, right, _ = labelled
        sizes: dict[str, int] = {}
        for operand, labels in (left, right):
            sizes |= {c: n for c, n in zip(labels, _sizes(operand), strict=True) if sizes.get(c, 1) == 1}
        flops += 2 * math.prod(sizes.values())
        rows |= {behind(o, Copy)[-1]: None for o, _ in (left, right) if _length(o, T) and not _made(o, T)}
    sequences = max((_sizes(n)[0] for n in rows), default=1)
    read = sum(bytes_hint(n) for n in rows) // sequences // tokens
    return Choosing(scores, flops // calls // tokens, read + moved // calls // tokens, not moved)


def _product(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    return product_labels(node) if packet(node) in LABELLED else None


def _made(node: fx.Node, T: Size) -> bool:
    """Whether a product over the keys made ``node``; otherwise it holds cached rows."""
    return any(_product(n) is not None for n in reachable([node], lambda n: with_keys(n, T)))


def _sizes(node: fx.Node) -> list[int]:
    return [hint(size(d), d) for d in val(node).shape]


def _length(node: fx.Node, T: Size) -> int:
    """Return the length of the key axis of ``node``, or 0 if there is no such axis."""
    return next((n for n, own in zip(_sizes(node), shape(node), strict=True) if same(own, T)), 0)
