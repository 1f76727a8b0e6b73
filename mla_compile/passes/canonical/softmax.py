"""Replaces a softmax that is written in parts by the operator, so that the attention is found.

Before: ``e = exp(x - amax(x, -1, True)); p = e / e.sum(-1, True)``, or ``p = exp(x - logsumexp(x, -1, True))``

Before: ``out = (e @ v) / e.sum(-1, True)``, flash-style: divided after the product

After: ``p = softmax(x, -1)``, and ``out = p @ v``. Any subtracted shift cancels if it is one number per row. If an
exponential without a shift overflows, the original gives NaN and the softmax does not.

Before: ``p = softmax(x, -1) * sigmoid(logsumexp(x, -1, True) - sink)``, or ``p = e / (e.sum(-1, True) + exp(sink))``

After: ``p = softmax(cat([x, sink], -1), -1)[..., :-1]``. In a row that sees no key the sink takes all. The original
gives NaN there if its softmax or its shift does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.score_tracer import SOFTMAX, ScoreTracer
from mla_compile.passes.attention.unfollowed import between_products
from mla_compile.passes.canonical.row_factors import DivisorTerm, RowFactors, RowNumber
from mla_compile.passes.ir.graph import ORIGIN, Builder, args_of, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.moves import Copy
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same_sizes
from mla_compile.passes.ir.walk import depends_on, remove_dead_code

aten = torch.ops.aten
_Factor: TypeAlias = tuple[object, bool]
"""A tensor or number, and whether it divides."""


def write_softmax(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Replace the softmaxes of attentions that are written in parts; return how many. All others stay as they are."""
    found = 0
    tracer = ScoreTracer(weights)
    alive = set(graph.nodes)
    # A factor comes after what it multiplies, so the last node has all factors.
    for node in reversed(list(graph.nodes)):
        written = _written(node, tracer) if node in alive else None
        if written is None:
            continue
        node.replace_all_uses_with(_replacement(Builder(node, fake_mode), node, written))
        remove_dead_code(graph)
        alive = set(graph.nodes)
        found += 1
    return found


@dataclass(frozen=True)
class _Factors:
    """``of``, multiplied by each of ``by`` that does not divide, and divided by the others."""

    of: fx.Node
    by: tuple[_Factor, ...] = ()


@dataclass(frozen=True)
class _Written:
    """``exp(x)`` along ``dim``, divided by the sum of itself and ``terms``; the result has the dtype of ``root``.

    ``product``: the value product, if some factor comes after it; ``weights`` are its operand.
    """

    x: fx.Node
    dim: int
    terms: tuple[DivisorTerm, ...]
    root: fx.Node
    weights: fx.Node
    product: fx.Node | None


def _written(node: fx.Node, tracer: ScoreTracer) -> _Written | None:
    found = _factors(node, tracer.is_product)
    if found is not None:
        return _divided_after(node, found, tracer)
    return next((w for w in _sums(node) if _of_attention(node, w, tracer)), None)


def _divided_after(node: fx.Node, later: _Factors, tracer: ScoreTracer) -> _Written | None:
    """Match a weighted sum with factors of its weights that come after it."""
    product, labelled = later.of, product_labels(later.of)
    if labelled is None or not later.by or len(product.users) != 1:
        return None
    left, right, out = labelled
    for e, labels in (left, right):
        dims = [d for d, c in enumerate(labels) if c not in out]
        # The factors are aligned with the output by position, so each position has to be the same axis in both.
        aligned = len(labels) == len(out) and all(
            a == b for d, (a, b) in enumerate(zip(labels, out, strict=True)) if [d] != dims
        )
        if len(dims) != 1 or not aligned or not same_sizes(_without(e, dims[0]), _without(product, dims[0])):
            continue
        # The weights are read by the product and perhaps by their sum: if anything else reads them, they have to stay.
        if len(e.users) <= 2:
            found = (w for w in _sums(e, later) if w.dim == dims[0] and _of_attention(node, w, tracer))
            if (first := next(found, None)) is not None:
                return first
    return None


def _of_attention(node: fx.Node, written: _Written, tracer: ScoreTracer) -> bool:
    # Elsewhere, a softmax would change the rounding of a model for no gain.
    if written.product is None and between_products(node, tracer) is None:
        return False
    return (written.product is None and not written.terms) or tracer.trace(written.x) is not None


def _is_root(node: fx.Node) -> bool:
    return packet(node) is aten.exp or packet(node) in SOFTMAX


_MOST_FACTORS = 8


def _factors(node: object, ends: Callable[[fx.Node], bool], most: int = _MOST_FACTORS) -> _Factors | None:
    """Return ``node`` as a product of what ``ends`` is true of and of factors that broadcast to it."""
    if not is_tensor(node) or not val(node).dtype.is_floating_point or not most:
        return None
    if ends(node):
        return _Factors(node)
    if isinstance(how := decode(node), Copy) and same_sizes(shape(how.x), shape(node)):
        return _factors(how.x, ends, most - 1)
    # A keyword is a rounding mode.
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or len(args_of(node)) != 2:
        return None
    a, b = args_of(node)
    for x, factor in ((a, b), (b, a))[: 1 if packet(node) is aten.div else 2]:
        if is_tensor(x) and same_sizes(shape(x), shape(node)):
            found = _factors(x, ends, most - 1)
            if found is not None:
                return _Factors(found.of, (*found.by, (factor, packet(node) is aten.div)))
    return None


def _sums(weights: fx.Node, later: _Factors | None = None) -> Iterator[_Written]:
    """Yield the softmaxes that ``weights`` are, with the factors of a product of them that come ``later``."""
    factors = _factors(weights, _is_root)
    if factors is None:
        return
    root, by = factors.of, factors.by if later is None else (*factors.by, *later.by)
    softmax = packet(root) in SOFTMAX
    if softmax and not by:
        return
    (exponent, *dim) = args_of(root)[:2]
    rank = len(shape(root))
    for d in [axis(dim[0], rank)] if softmax else range(rank):
        rows = RowFactors(exponent, d)
        whole = rows.softmax() if softmax else 1 / rows.shift
        for factor, divides in by:
            value = rows.value(factor)
            if value is None:
                break
            whole = whole / value if divides else whole * value
        else:
            terms = rows.divisor(whole)
            if terms is None or (softmax and not terms):
                continue
            if not any(depends_on(n.node, {rows.x}) for term in terms for n, _ in term.powers):
                yield _Written(rows.x, d, terms, root, weights, None if later is None else later.of)


def _without(x: fx.Node, dim: int) -> list[Size]:
    return [n for d, n in enumerate(shape(x)) if d != dim]


def _replacement(builder: Builder, node: fx.Node, written: _Written) -> fx.Node:
    p, product = _softmax(builder, written), written.product
    if product is not None:
        p = builder.cast(p, val(written.weights).dtype)
        given = fx.map_arg(product.args, lambda n: p if n is written.weights else n)
        assert callable(product.target)
        p = builder.call(product.target, *given, **product.kwargs)
    new = builder.cast(p, val(node).dtype)
    if ORIGIN in node.meta:
        new.meta[ORIGIN] = node.meta[ORIGIN]  # the node of the untouched graph that computes the same
    return new


def _softmax(builder: Builder, written: _Written) -> fx.Node:
    """The softmax of a row, or of the row and one more score that is dropped again, in the dtype of the original."""
    call, dim = builder.call, written.dim
    # A sink may be in float32 beside scores in half precision.
    numbers = [val(number.node).dtype for term in written.terms for number, _ in term.powers]
    x = builder.cast(written.x, reduce(torch.promote_types, numbers, val(written.root).dtype))
    if not written.terms:
        return call(aten.softmax.int, x, dim)
    sinks = [_sink(builder, x, dim, term) for term in written.terms]
    joined = call(aten.cat.default, [x, reduce(lambda a, b: call(aten.logaddexp.default, a, b), sinks)], dim)
    return call(aten.slice.Tensor, call(aten.softmax.int, joined, dim), dim, 0, -1)


def _sink(builder: Builder, x: fx.Node, dim: int, term: DivisorTerm) -> fx.Node:
    """The logarithm of a term, as a column beside ``x``."""
    call, rank = builder.call, len(shape(x))
    found: fx.Node | None = None
    for number, power in term.powers:
        one = builder.cast(_with_axis(builder, number, rank - dim), val(x).dtype)
        one = one if power == 1 else call(aten.mul.Tensor, one, power)
        found = one if found is None else call(aten.add.Tensor, found, one)
    if found is None:
        found = call(aten.full.default, [1] * rank, math.log(term.factor), dtype=val(x).dtype, device=val(x).device)
    elif term.factor != 1:
        found = call(aten.add.Tensor, found, math.log(term.factor))
    sizes = [1 if d == dim else builder.size(x, d) for d in range(rank)]
    return call(aten.expand.default, found, sizes)


def _with_axis(builder: Builder, number: RowNumber, from_right: int) -> fx.Node:
    place = len(shape(number.node)) - from_right + 1
    return number.node if number.kept or place < 0 else builder.call(aten.unsqueeze.default, number.node, place)
