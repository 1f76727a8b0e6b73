"""What it takes to choose the keys of a sparse attention: the indexer, which looks at every cached token.

It is left as it is written. Its products over the keys are counted so that a report shows what still grows with the
context: FLOPs, and the bytes of the rows that they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from mla_compile.passes.attention.chosen import ranked
from mla_compile.passes.decide.records import AbsorbPlan
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import bytes_hint, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.operators import Copy, decode
from mla_compile.passes.ir.sizes import Size, hint, same, size
from mla_compile.passes.ir.walk import reachable


class Choosing(NamedTuple):
    """Of one sequence and query, for each token in the context."""

    flops: int
    bytes: int


def choosing(plan: AbsorbPlan) -> Choosing | None:
    """What choosing the keys takes; None where no scores of them are found (they came in, or another layer chose)."""
    chosen = plan.visible.chosen
    found = None if chosen is None else ranked(chosen)
    if chosen is None or found is None:
        return None
    T = axis_size(chosen.keys)
    scores = found[0]
    calls = math.prod(_sizes(scores)) // max(1, _length(scores, T))  # sequences and queries
    flops = 0
    rows: dict[fx.Node, None] = {}
    for node in reachable([scores], lambda n: _over(n, T)):
        if (labelled := _product(node)) is None:
            continue
        left, right, _ = labelled
        sizes: dict[str, int] = {}
        for operand, labels in (left, right):
            sizes |= {c: n for c, n in zip(labels, _sizes(operand), strict=True) if sizes.get(c, 1) == 1}
        flops += 2 * math.prod(sizes.values())
        rows |= {_stored(o): None for o, _ in (left, right) if _length(o, T) and not _made(o, T)}
    tokens = max(1, _length(scores, T))
    sequences = max((_sizes(n)[0] for n in rows), default=1)
    return Choosing(flops // calls // tokens, sum(bytes_hint(n) for n in rows) // sequences // tokens)


def _product(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    return product_labels(node) if packet(node) in LABELLED else None


def _over(node: fx.Node, T: Size) -> Iterable[fx.Node]:
    """The inputs of ``node`` that have an axis of all keys."""
    return [n for n in node.all_input_nodes if is_tensor(n) and _length(n, T)]


def _made(node: fx.Node, T: Size) -> bool:
    """Whether a product over the keys made ``node``; else they are rows that are kept."""
    return any(_product(n) is not None for n in reachable([node], lambda n: _over(n, T)))


def _stored(node: fx.Node) -> fx.Node:
    while isinstance(how := decode(node), Copy):
        node = how.x
    return node


def _sizes(node: fx.Node) -> list[int]:
    return [hint(size(d), d) for d in val(node).shape]


def _length(node: fx.Node, T: Size) -> int:
    """The size of the axis of keys that ``node`` has, 0 where it has none."""
    return next((n for n, own in zip(_sizes(node), shape(node), strict=True) if same(own, T)), 0)
