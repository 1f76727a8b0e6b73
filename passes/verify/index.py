"""A numeric check of the scores of an indexer against the original, as attentions are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from mla_compile.passes.attention.indexer import Indexer
from mla_compile.passes.ir.axes import Atom, axis_size
from mla_compile.passes.ir.graph import ORIGIN, shape, val
from mla_compile.passes.verify.check import BUDGET_BYTES, LONG, Check, compare_values, nearest_known, renamed
from mla_compile.passes.verify.evaluate import number, symbols


def index_key(found: Indexer) -> tuple[object, ...]:
    """Indexers with equal keys are the same computation on other tensors; one of them is checked."""
    names: dict[Atom, int] = {}
    operands = (found.query, found.keys, found.weights, found.out)
    axes = tuple(tuple(tuple(names.setdefault(a, len(names)) for a in one) for one in o.axes) for o in operands)
    shapes = tuple((val(o.node).dtype, shape(o.node)) for o in operands)
    key = axes, shapes, found.scale, found.factor
    return renamed(key, symbols([o.node for o in operands]))


def check_index(found: Indexer, new: fx.Node, original: fx.Graph, weights: Mapping[str, torch.Tensor | None]) -> Check:
    """Compares ``new`` with the same scores in ``original``, at the sizes of the trace and with a longer context."""
    before = {n.name: n for n in original.nodes}
    operands = (found.query, found.keys, found.weights)
    boundary = {name: before[name] for name in nearest_known([o.node for o in operands], weights)}
    seen = symbols([*boundary.values(), *(o.node for o in operands), found.out.node])
    contexts = [seen]
    free = [s for a in found.tokens if not isinstance(a.size, int) for s in a.size.free_symbols]
    if len(free) == 1:
        contexts.append({**seen, free[0]: LONG})
    ratios: list[float] = []
    for sizes in contexts:
        products = (*found.batch, *found.queries, *found.heads, *found.tokens)
        # Eight bytes a value in float64, and room for four tensors of that size.
        if 32 * number(axis_size(products), sizes) > BUDGET_BYTES:
            return Check(max(ratios, default=None), note="not checked numerically: the context is too long")
        check = compare_values(before[found.out.node.meta[ORIGIN]], new, boundary, weights, sizes)
        if check.problem is not None:
            return check
        ratios += [] if check.ratio is None else [check.ratio]
    return Check(max((r for r in ratios if math.isfinite(r)), default=None))
