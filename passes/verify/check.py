"""A numeric check of rewritten sites against the original, in float64 and in the model's own precision.

The part of the graph between a site's inputs (rows, queries, masks, weights) and its output is run four times on the
same random inputs: original and rewritten, in float64 and as it is. In float64 the two must agree to rounding, which is
the proof obligation seen from the outside. In the model's dtype the rewritten error may not exceed what the original
allows. Inputs are ordinary, large (a softmax near one-hot) and padded; a symbolic context is also taken long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import sympy
import torch
from torch import fx

from mla_compile.passes.attention.site import Chosen
from mla_compile.passes.decide.records import AbsorbPlan
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.expr import Factor
from mla_compile.passes.ir.graph import ORIGIN, args_of, decides, is_tensor, is_virtual, shape, val, whole_rows
from mla_compile.passes.ir.operators import Fill, decode
from mla_compile.passes.ir.sizes import size
from mla_compile.passes.ir.walk import depends_on, reachable
from mla_compile.passes.verify.evaluate import Evaluation, Listed, draw, number, of_sizes, symbols

EXACT = 1e-8
"""Largest relative difference in float64 that rounding can explain.

Float64 has 16 digits; sums over a context and a softmax of large scores lose several of them. A wrong formula differs
in the first digits."""
ALLOWED = 1.5
"""Largest error of the rewritten site, in errors of the original (plus two units in the last place).

The absorbed form rounds at other places than the original, and no more often: the ratio is near 1, and quantiles of
a sample scatter around it."""
ROWS, TRIALS, MORE = 128, 16, 128
"""Rows of output wanted for a comparison of errors, and the most draws of inputs made to get them.

The 0.9 quantile of 128 rows has a dozen rows beyond it. A decode step of one head has a single row per draw, so the
draws are limited too. But the 0.9 quantile of two dozen rows is luck: it takes ``MORE`` draws to condemn a site."""
BUDGET_FLOPS, BUDGET_BYTES = 1e11, 2**31
"""What one check may cost: FLOPs, and 2 GiB. Sites with a larger fixed context are reported as not checked."""
LONG = 613
"""A context longer than any block of the kernels, for graphs whose context is symbolic."""

_SCALES = (1.0, 8.0)  # ordinary inputs, and large ones whose softmax is near one-hot


@dataclass(frozen=True)
class Check:
    """The result for one site: error ratio (None if not checked), and what is wrong (None if nothing)."""

    ratio: float | None
    problem: str | None = None
    note: str | None = None


def key_of(plan: AbsorbPlan) -> tuple[object, ...]:
    """Sites with equal keys are the same computation on other weights; one of them is checked.

    Each layer's cache has symbols of its own: they count by the place where they appear, and by the size seen.
    """
    operands = [plan.site.out, plan.site.v, *plan.site.between]
    terms = tuple(
        (t.start, t.stop, t.product, t.piece.scale, _factor_key(t.piece.weight), _factor_key(t.piece.bias))
        for t in (*plan.keys, *plan.vals)
    )
    shapes = tuple((val(o.node).dtype, shape(o.node)) for o in operands)
    rows = tuple((val(n).dtype, shape(n), _view_key(n)) for n in plan.sources)
    site, seen = plan.site, plan.visible
    # Masks of equal shapes may say other things: of one layer a window, of the next one none.
    told = (
        *(length.const for length in seen.lengths),
        len(seen.counts),
        len(seen.masks),
        _list_key(seen.chosen),
        seen.causal,
        seen.window,
        seen.alike,
        seen.fill,
        site.sinks is None,
    )
    key = plan.dims, site.scale, site.causal, site.empty, site.open_core, shapes, rows, terms, told
    return renamed(key, symbols([*(o.node for o in operands), *plan.sources]))


def _view_key(node: fx.Node) -> tuple[object, ...]:
    """Which part of which rows a virtual ``node`` is: values are drawn for the rows."""
    if not is_virtual(node):
        return ()
    of, *args = args_of(node)
    at = tuple(size(a.meta["val"]) if isinstance(a, fx.Node) else a for a in args)
    return str(node.target), shape(of), at, _view_key(of)


def renamed(key: tuple[object, ...], seen: Mapping[sympy.Symbol, int]) -> tuple[object, ...]:
    """``key`` with the symbols of which a size was ``seen`` numbered, and these sizes."""
    numbered: dict[sympy.Symbol, sympy.Symbol] = {}

    def of(part: object) -> object:
        if isinstance(part, tuple):
            return tuple(map(of, part))
        if not isinstance(part, sympy.Basic):
            return part
        for symbol in sorted(part.free_symbols & seen.keys(), key=str):
            numbered.setdefault(symbol, sympy.Symbol(f"size_{len(numbered)}", **symbol.assumptions0))
        return part.xreplace(numbered)

    return tuple(map(of, key)), tuple(seen[symbol] for symbol in numbered)


def _factor_key(factor: Factor | None) -> tuple[object, ...] | None:
    if factor is None:
        return None
    terms = tuple(tuple(map(_factor_key, term)) for term in factor.terms)
    return factor.expr.shape, factor.expr.value.dtype, terms


def check_site(
    plan: AbsorbPlan,
    new: fx.Node,
    original: fx.Graph,
    weights: Mapping[str, torch.Tensor | None],
    given: Sequence[fx.Node] = (),
) -> Check:
    """Compares the rewritten output ``new`` with the same site in ``original`` (a copy made before the rewrite).

    ``given``: the rows that get random numbers, where they are others than the plan's.
    """
    before = {n.name: n for n in original.nodes}
    inputs = [
        *(n for source in given or plan.sources for n in decides(source)),
        *(p.q.node for p in plan.site.products),
        *plan.visible.given,
    ]
    old, new, beside = _observed(plan.site.node, new)
    boundary = {name: before[name] for name in nearest_known([*inputs, *beside], weights)}
    # What the plan's rows are cut from need not be as long as they are.
    longer = all(node in plan.sources for node in given)
    return compare(plan, before[old], new, boundary, weights, longer=longer)


def _observed(site: fx.Node, new: fx.Node) -> tuple[str, fx.Node, list[fx.Node]]:
    """Where both graphs are compared: the name in the untouched one, the node in the rewritten one, what else it reads.

    That is the site's output, unless canonicalisation took it out of a larger operator (a product out of ``baddbmm``):
    then it is what that operator computed.
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
    """The nearest nodes behind ``nodes`` that compute what a node of the untouched graph does, by the names there.

    Given values for these, both graphs say the same. ``without``: what is given already; what is computed from it is
    computed, not given.
    """
    found: dict[str, fx.Node] = {}

    def behind(node: fx.Node) -> Iterable[fx.Node]:
        # Zeros that something is written into are no input, but zeros.
        if node in without or node.name in weights or isinstance(decode(node), Fill):
            return ()
        if is_tensor(node) and ORIGIN in node.meta and not depends_on(node, without):
            found[node.meta[ORIGIN]] = node
            return ()
        return node.all_input_nodes

    deque(reachable(nodes, behind), maxlen=0)
    return found


def compare(
    plan: AbsorbPlan,
    old: fx.Node,
    new: fx.Node,
    boundary: Mapping[str, fx.Node],
    weights: Mapping[str, torch.Tensor | None],
    seed: int = 0,
    share: float = 1.0,
    longer: bool = True,
) -> Check:
    """Compares ``new`` with ``old``, both from the same values of ``boundary``.

    ``share``: how many of the heads that are computed are those of ``plan``. ``longer``: with more keys, too, than in
    the trace.
    """
    ratios: list[float] = []
    note = None
    contexts = _contexts(plan, boundary.values())
    for sizes in contexts if longer else contexts[:1]:
        if _too_large(plan, sizes, share):
            note = "not checked numerically: the context is too long for a float64 run"
            continue
        keys = number(axis_size(plan.site.keys), sizes)
        counts = {n.meta[ORIGIN]: keys for n in plan.visible.counts if ORIGIN in n.meta}
        found = compare_values(old, new, boundary, weights, sizes, seed, counts, _lists(plan, sizes))
        if found.problem is not None:
            return found
        ratios += [] if found.ratio is None else [found.ratio]
    return Check(max(ratios, default=None), note=note)


def compare_values(
    old: fx.Node,
    new: fx.Node,
    boundary: Mapping[str, fx.Node],
    weights: Mapping[str, torch.Tensor | None],
    sizes: Mapping[sympy.Symbol, int],
    seed: int = 0,
    counts: Mapping[str, int] = MappingProxyType({}),
    lists: Mapping[str, Listed] = MappingProxyType({}),
) -> Check:
    """Compares two nodes at ``sizes``; which inputs of ``boundary`` are ``counts`` and ``lists``, see :func:`draw`."""
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    rounds = val(old).dtype != torch.float64  # else the model runs in the precision of the truth: no error can be seen
    for trial in range(MORE):
        generator = torch.Generator().manual_seed(seed + trial)
        scale = _SCALES[trial % len(_SCALES)]
        given = {
            name: draw(node, sizes, scale, generator, counts.get(name), lists.get(name))
            for name, node in boundary.items()
        }
        runs = [Evaluation(weights, given, sizes, seed + trial, dtype) for dtype in (torch.float64, None)]
        truth, reference = (run.value(old) for run in runs)
        exact, result = (run.value(new) for run in runs)
        difference = _distance(exact, truth)
        # Written so that NaN fails.
        if not difference <= EXACT:
            return Check(None, f"differs from the original by {difference:.1e} in float64")
        if not torch.isfinite(result)[torch.isfinite(reference)].all():
            return Check(None, "gives inf or nan where the original does not")
        ours.append(_row_errors(result, truth, reference))
        theirs.append(_row_errors(reference, truth, reference))
        if trial + 1 >= len(_SCALES) and sum(len(e) for e in ours) >= ROWS:
            break
        # Looked at once before the end, not after every draw: whoever looks often enough finds a lucky moment.
        if trial + 1 == TRIALS and (not rounds or _judged(ours, theirs, old).problem is None):
            break
    return _judged(ours, theirs, old) if rounds else Check(None)


def _judged(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], old: fx.Node) -> Check:
    problem, ratio = _judge_errors(torch.cat(list(ours)), torch.cat(list(theirs)), torch.finfo(val(old).dtype).eps)
    return Check(ratio, problem)


def _list_key(chosen: Chosen | None) -> tuple[object, ...]:
    if chosen is None:
        return ()
    known = chosen.distinct, chosen.block, chosen.any_number, chosen.flags is None, chosen.scores is None
    return *known, *((val(n).dtype, shape(n)) for n in chosen.decides)


def _lists(plan: AbsorbPlan, sizes: Mapping[sympy.Symbol, int]) -> dict[str, Listed]:
    """The input that lists the keys of each query, if one does, by its name in the untouched graph."""
    chosen = plan.visible.chosen
    if chosen is None or chosen.scores is not None or ORIGIN not in chosen.indices.node.meta:
        return {}
    axes = chosen.indices.axes
    # Of one key there is no axis, and any that is as short will do.
    along = axes.index(chosen.count) if chosen.count in axes else len(axes) - 1
    return {chosen.indices.node.meta[ORIGIN]: Listed(number(chosen.names, sizes), along, chosen.distinct)}


def _judge_errors(ours: torch.Tensor, theirs: torch.Tensor, eps: float) -> tuple[str | None, float | None]:
    """What is wrong with the errors of the rewritten rows, if anything, and the ratio of the median errors.

    Errors are heavy-tailed (a softmax near a tie is as good as a coin toss), so quantiles are compared, not means.
    """
    for quantile in (0.5, 0.9):
        a, b = float(ours.quantile(quantile)), float(theirs.quantile(quantile))
        if a > ALLOWED * b + 2 * eps:
            return f"has an error of {a:.1e} where the original has {b:.1e}", a / b if b else math.inf
    median = float(theirs.median())
    return None, float(ours.median()) / median if median > 0 else None


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative RMS difference over the entries where the truth ``b`` is finite; inf where only one of them is."""
    finite = torch.isfinite(b)
    if not torch.isfinite(a)[finite].all():
        return math.inf
    norm = b[finite].square().mean().sqrt() if finite.any() else b.new_zeros(())
    error = (a[finite] - b[finite]).square().mean().sqrt() if finite.any() else norm
    return float(error / norm) if norm > 0 else float(error)


def _row_errors(result: torch.Tensor, truth: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Relative error of every row of features that is finite in ``where`` and in the truth."""
    finite = (torch.isfinite(where) & torch.isfinite(truth)).all(-1)
    truth, result = truth[finite], result[finite].double()
    norm = truth.norm(dim=-1)
    errors: torch.Tensor = (result - truth).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float64).tiny)
    return errors[norm > 0]


def _contexts(plan: AbsorbPlan, boundary: Iterable[fx.Node]) -> list[dict[sympy.Symbol, int]]:
    """Values for the shape symbols: those of the trace, and a long context where the shapes allow one."""
    operands = [plan.site.v, *(p.k for p in plan.site.products), *plan.site.between]
    operands += [p.q for p in plan.site.products]
    boundary = list(boundary)
    # What decides a mask or a slice of rows need not have the symbols of what it decides.
    nodes = [*boundary, plan.site.node, *(o.node for o in operands), *(whole_rows(n) for n in plan.sources)]
    seen = {**symbols(nodes), **_symbols_told(plan.sources)}
    if any(whole_rows(n) is not n for n in plan.sources):
        return [seen]  # only some of the rows are read, and their number need not be that of the keys
    context = [a.size for a in plan.site.keys if not isinstance(a.size, int)]
    if len(context) != 1 or len(context[0].free_symbols) != 1:
        return [seen]
    (symbol,) = context[0].free_symbols
    if not any(symbol in sympy.sympify(n).free_symbols for o in operands for n in shape(o.node)):
        return [seen]  # a guard has since replaced it by another
    # A length that no operand has is of something that is read at positions, such as a mask: as many more there.
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
    """The symbols that say which rows are sliced out; no shape need have them (the newest 8 of n)."""
    told: dict[sympy.Symbol, int] = {}
    for node in rows:
        while is_virtual(node):
            told.update(of_sizes(n.meta["val"] for n in node.all_input_nodes[1:]))
            node = args_of(node)[0]
    return told


def _too_large(plan: AbsorbPlan, sizes: Mapping[sympy.Symbol, int], share: float) -> bool:
    b, s, t = (number(x, sizes) for x in plan.sizes())
    d = plan.dims
    # Of rows that are sliced the original expands all.
    whole = max(_elements(whole_rows(n), sizes) / max(1, _elements(n, sizes)) for n in plan.sources)
    expanded = b * t * d.expanded_values / share * whole
    # Eight bytes a value in float64, and room for four tensors of that size.
    return expanded * 8 * 4 > BUDGET_BYTES or 2 * expanded * (d.L + s) > BUDGET_FLOPS


def _elements(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> int:
    return math.prod(number(size(d), sizes) for d in val(node).shape)
