"""Choose what to compare for an indexer's scores that became one operator."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from mla_compile.passes.attention.indexer import Indexer
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.verify.comparison import BUDGET_BYTES, LONG, Comparison, Run
from mla_compile.passes.verify.evaluate import number, symbols
from mla_compile.passes.verify.sites import nearest_known


def index_comparison(
    found: Indexer, new: fx.Node, untouched: Mapping[str, fx.Node], weights: Collection[str]
) -> Comparison:
    """Compare ``new`` with the same scores in the ``untouched`` graph, at the traced sizes and with a longer context.

    ``untouched``: the nodes of that graph by name.
    """
    operands = (found.query, found.keys, found.weights)
    boundary = {name: untouched[name] for name in nearest_known([o.node for o in operands], weights)}
    seen = symbols([*boundary.values(), *(o.node for o in operands), found.out.node])
    contexts = [seen]
    free = [s for a in found.tokens if not isinstance(a.size, int) for s in a.size.free_symbols]
    if len(free) == 1:
        contexts.append({**seen, free[0]: LONG})
    products = (*found.batch, *found.queries, *found.heads, *found.tokens)
    # A float64 value takes eight bytes; four tensors of this size are budgeted.
    fits = [sizes for sizes in contexts if 32 * number(axis_size(products), sizes) <= BUDGET_BYTES]
    note = None if len(fits) == len(contexts) else "not checked numerically: the context is too long"
    return Comparison(untouched[found.out.node.meta[ORIGIN]], new, boundary, [Run(sizes) for sizes in fits], note)
