"""The expected sizes of the calls of a rewritten attention, for the cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from mla_compile.passes.attention.site import Operand
from mla_compile.passes.ir.axes import Axis, axis_size
from mla_compile.passes.ir.graph import BESIDE, bytes_hint, val, whole_rows
from mla_compile.passes.ir.sizes import hint, least_of, size
from mla_compile.passes.sources.cached import come_from
from mla_compile.passes.sources.records import AbsorbPlan


@dataclass(frozen=True)
class CallSizes:
    """Representative numbers for B, S and T, and what is known about S. A ``T`` of None represents a long context.

    ``symbolic``: the number of queries may differ from call to call. ``prefill``: the number of queries is symbolic,
    and either equals the number of keys (a prompt) or buffers hold K and V. ``made``: the number of tokens for which K
    and V are made before T tokens are sliced out; 0 if buffers hold K and V in addition to the rows. ``chosen``: the
    number of keys in a query's sparse index list.
    """

    B: int
    S: int
    T: int | None
    element_bytes: int
    prefill: bool
    symbolic: bool
    made: int | None = None
    chosen: int | None = None

    @property
    def many(self) -> str:
        """The reason why many queries are assumed if ``prefill`` is set."""
        if self.made == 0:
            return "several queries per call, and K and V of all keys are in the buffers beside the rows"
        return "a prompt: as many queries as keys, whatever their number"  # the traced length may favour absorbing


def call_sizes(plan: AbsorbPlan) -> CallSizes:
    _, s, t = plan.sizes()
    counts = [_axis_hint(plan, axis) for axis in (plan.batch, plan.site.queries, plan.site.keys)]
    # A call with one query is a decode step. It will see long contexts, whatever the traced length.
    context = None if s == 1 or not isinstance(t, int) else counts[2]
    symbolic = not isinstance(s, int)
    element = val(plan.latent.node).element_size()
    # Attention reads a slice of a static cache, but the expanded form makes K and V of the whole cache. Rows without
    # columns have no bytes, so their share is 0.
    shares = [bytes_hint(whole_rows(r.node)) / max(bytes_hint(r.node), 1) for r in plan.rows]
    made = None if context is None or max(shares) <= 1 else math.ceil(context * max(shares))
    if come_from((r.node for r in plan.rows), BESIDE):
        made = 0
    prefill = symbolic and (s == t or made == 0)
    return CallSizes(counts[0], counts[1], context, element, prefill, symbolic, made, chosen_keys(plan))


def keys_read(plan: AbsorbPlan) -> tuple[int, int]:
    """Return the maximum number of keys that a query reads under windows and index lists, and the number of all keys.

    Traced sizes are used.
    """
    T, seen = _axis_hint(plan, plan.site.keys), plan.visible
    return min(T, seen.window or T, chosen_keys(plan) or T), T


def chosen_keys(plan: AbsorbPlan) -> int | None:
    """Return the number of keys in each query's index list in a long context; None if there is no list."""
    chosen = plan.visible.chosen
    if chosen is None:
        return None
    # The list's length is the minimum of a fixed number and a size, because all keys are chosen in a short context.
    fixed = [int(n) for n in least_of(axis_size(chosen.count)) if sympy.sympify(n).is_Integer]
    return (min(fixed, default=None) or _axis_hint(plan, chosen.count, chosen.indices)) * chosen.block


def _axis_hint(plan: AbsorbPlan, axis: Axis, *more: Operand) -> int:
    """Return the size of a product of atoms, at the sizes seen when the graph was traced."""
    hints: dict[Axis, int] = {}
    for operand in (plan.site.out, plan.site.v, *(p.k for p in plan.site.products), *more):
        for own, dim in zip(operand.axes, val(operand.node).shape, strict=True):
            hints[own] = hint(size(dim), dim)
    if axis in hints:
        return hints[axis]
    return math.prod(hints.get((a,), a.size if isinstance(a.size, int) else 1) for a in axis)
