"""Choose what to compare for a rewritten attention: the part of the graph between its inputs and its output.

The inputs (rows, queries, masks, weights) get random values. Half of the draws are so large that the softmax is near
one-hot. Masks may be padding masks. If the context is symbolic, a large length is also checked.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy
from torch import fx

from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import ORIGIN, args_of, decides, is_tensor, is_virtual, shape, val, whole_rows
from mla_compile.passes.ir.moves import Fill
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same_sizes, size
from mla_compile.passes.ir.walk import depends_on, reachable
from mla_compile.passes.sources.records import AbsorbPlan
from mla_compile.passes.verify.comparison import BUDGET_BYTES, BUDGET_FLOPS, LONG, Comparison, Run
from mla_compile.passes.verify.evaluate import Listed, number, of_sizes, symbols


def site_comparison(
    plan: AbsorbPlan, new: fx.Node, untouched: Mapping[str, fx.Node], given: Sequence[fx.Node], weights: Collection[str]
) -> Comparison:
    """Return a comparison of the rewritten output ``new`` with the site's output in the untouched graph.

    ``untouched``: the nodes of the untouched graph, by name. ``given``: the rows that get random numbers; empty if
    these are the plan's rows.
    """
    inputs = [
        *(n for source in given or plan.sources for n in decides(source)),
        *(p.q.node for p in plan.site.products),
        *plan.visible.given,
    ]
    old, new, beside = _observed(plan.site.node, new)
    boundary = {name: untouched[name] for name in nearest_known([*inputs, *beside], weights)}
    # The plan's rows may be slices of a tensor whose length differs from the number of keys.
    longer = all(any(same_sizes(shape(node)[:-1], shape(source)[:-1]) for source in plan.sources) for node in given)
    return compared(plan, untouched[old], new, boundary, longer=longer)


def _observed(site: fx.Node, new: fx.Node) -> tuple[str, fx.Node, list[fx.Node]]:
    """Return the name of the untouched node to compare, the rewritten node, and its other inputs.

    The nodes are usually outputs of the site. If canonicalisation extracted the output from a larger operator (such as
    a product from ``baddbmm``), the nodes are results of the larger operator.
    """
    if ORIGIN in site.meta:
        return site.meta[ORIGIN], new, []
    beside: list[fx.Node] = []
    while ORIGIN not in new.meta:
        (user,) = new.users
        beside += [n for n in user.all_input_nodes if n is not new]
        new = user
    return new.meta[ORIGIN], new, beside


def nearest_known(
    nodes: Iterable[fx.Node], weights: Collection[str], without: Collection[fx.Node] = ()
) -> dict[str, fx.Node]:
    """Return the nearest nodes upstream of ``nodes`` that the untouched graph also has, by their names there.

    Given equal values of these nodes, both graphs must compute equal results. ``without``: nodes that already have
    values. No values are drawn for nodes downstream of ``without``, because these nodes are computed.
    """
    found: dict[str, fx.Node] = {}

    def behind(node: fx.Node) -> Iterable[fx.Node]:
        # Zeros into which rows are written are a constant, not an input.
        if node in without or node.name in weights or isinstance(decode(node), Fill):
            return ()
        if is_tensor(node) and ORIGIN in node.meta and not depends_on(node, without):
            found[node.meta[ORIGIN]] = node
            return ()
        return node.all_input_nodes

    deque(reachable(nodes, behind), maxlen=0)
    return found


def compared(
    plan: AbsorbPlan,
    old: fx.Node,
    new: fx.Node,
    boundary: Mapping[str, fx.Node],
    share: float = 1.0,
    *,
    longer: bool = True,
) -> Comparison:
    """Return a comparison of ``new`` with ``old``, which are both computed from the same values of ``boundary``.

    ``share``: the fraction of the computed heads that belongs to ``plan``. ``longer``: whether to also compare with
    more keys than in the trace.
    """
    runs: list[Run] = []
    note = None
    contexts = _contexts(plan, boundary.values())
    for sizes in contexts if longer else contexts[:1]:
        if _too_large(plan, sizes, share):
            note = "not checked numerically: the context is too long for a float64 run"
            continue
        keys = number(axis_size(plan.site.keys), sizes)
        counts = {n.meta[ORIGIN]: keys for n in plan.visible.counts if ORIGIN in n.meta}
        runs.append(Run(sizes, counts, _lists(plan, sizes)))
    return Comparison(old, new, boundary, runs, note)


def _lists(plan: AbsorbPlan, sizes: Mapping[sympy.Symbol, int]) -> dict[str, Listed]:
    """Describe the input that is a sparse index list, if there is one, by its name in the untouched graph."""
    chosen = plan.visible.chosen
    if chosen is None or chosen.scores is not None or ORIGIN not in chosen.indices.node.meta:
        return {}
    axes = chosen.indices.axes
    # A list with one entry per query has no axis of entries, and any axis of length 1 can be used.
    along = axes.index(chosen.count) if chosen.count in axes else len(axes) - 1
    return {chosen.indices.node.meta[ORIGIN]: Listed(number(chosen.names, sizes), along, chosen.distinct)}


def _contexts(plan: AbsorbPlan, boundary: Iterable[fx.Node]) -> list[dict[sympy.Symbol, int]]:
    """Return values for the shape symbols: the traced values, and a long context if the shapes allow it."""
    operands = [plan.site.v, *(p.k for p in plan.site.products), *plan.site.between]
    operands += [p.q for p in plan.site.products]
    boundary = list(boundary)
    # The inputs of a mask or of a slice of rows may have symbols of their own.
    nodes = [*boundary, plan.site.node, *(o.node for o in operands), *(whole_rows(n) for n in plan.sources)]
    seen = {**symbols(nodes), **_symbols_told(plan.sources)}
    if any(whole_rows(n) is not n for n in plan.sources):
        return [seen]  # the slice may have fewer rows than there are keys
    context = [a.size for a in plan.site.keys if not isinstance(a.size, int)]
    if len(context) != 1 or len(context[0].free_symbols) != 1:
        return [seen]
    (symbol,) = context[0].free_symbols
    if not any(symbol in sympy.sympify(n).free_symbols for o in operands for n in shape(o.node)):
        return [seen]  # a guard has since replaced this symbol by another
    # Symbols of other inputs, such as position masks, must grow by the same number of tokens as the context.
    beside = _sized_by(boundary) - _sized_by(o.node for o in operands)
    longer = {**seen, **{s: seen[s] + LONG - seen[symbol] for s in beside}, symbol: LONG}
    sizes: dict[object, int] = {}
    for operand in operands:
        for axis, dim in zip(operand.axes, val(operand.node).shape, strict=True):
            length = number(size(dim), longer)
            if axis and sizes.setdefault(axis, length) != length:
                return [seen]  # two symbols that must stay equal
    return [seen, longer]


def _sized_by(nodes: Iterable[fx.Node]) -> set[sympy.Symbol]:
    return {symbol for n in nodes for dim in shape(n) for symbol in sympy.sympify(dim).free_symbols}


def _symbols_told(rows: Sequence[fx.Node]) -> dict[sympy.Symbol, int]:
    """Return the symbols in the bounds of sliced rows. Shapes need not contain these symbols."""
    told: dict[sympy.Symbol, int] = {}
    for node in rows:
        while is_virtual(node):
            told.update(of_sizes(n.meta["val"] for n in node.all_input_nodes[1:] if not is_tensor(n)))
            node = args_of(node)[0]
    return told


def _too_large(plan: AbsorbPlan, sizes: Mapping[sympy.Symbol, int], share: float) -> bool:
    b, s, t = (number(x, sizes) for x in plan.sizes())
    d = plan.dims
    # If the rows are a slice, the original graph expands the whole tensor.
    whole = max(_elements(whole_rows(n), sizes) / max(1, _elements(n, sizes)) for n in plan.sources)
    expanded = b * t * d.expanded_values / share * whole
    # A float64 value takes eight bytes; four tensors of this size are budgeted.
    return expanded * 8 * 4 > BUDGET_BYTES or 2 * expanded * (d.L + s) > BUDGET_FLOPS


def _elements(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> int:
    return math.prod(number(size(d), sizes) for d in val(node).shape)
