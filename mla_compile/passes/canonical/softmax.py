"""Replace a softmax that the model writes in parts by the softmax operator, so that the attention is found.

Before: ``e = exp(x - amax(x, -1, True)); p = e / e.sum(-1, True)``, or ``p = exp(x - logsumexp(x, -1, True))``

Before: ``out = (e @ v) / e.sum(-1, True)``, flash-style: divided after the product

After: ``p = softmax(x, -1)``, and ``out = p @ v``. A subtracted shift cancels if it is one number per row. If there is
no shift and an exponential overflows, the original gives NaN and the softmax does not.

Before: ``p = softmax(x, -1) * sigmoid(logsumexp(x, -1, True) - sink)``, or ``p = e / (e.sum(-1, True) + exp(sink))``

After: ``p = softmax(cat([x, sink], -1), -1)[..., :-1]``. If a row sees no key, the sink gets probability 1. For this
row, the original gives NaN if its softmax or its shift is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.score_tracer import SOFTMAX, ScoreTracer
from mla_compile.passes.attention.unfollowed import between_products
from mla_compile.passes.canonical.factored import Factored, Placed, factored, viewed
from mla_compile.passes.canonical.row_factors import DivisorTerm, RowFactors, row_axes
from mla_compile.passes.canonical.sink_columns import dtype_of_terms, sink_column
from mla_compile.passes.ir.axes import Axes, Axis, fresh_axis
from mla_compile.passes.ir.graph import ORIGIN, Builder, args_of, axis, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.walk import depends_on, remove_dead_code

aten = torch.ops.aten


def write_softmax(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Replace softmaxes that attentions write in parts; return how many. Other softmaxes stay unchanged."""
    found = 0
    tracer = ScoreTracer(weights)
    alive = set(graph.nodes)
    # Nodes are visited from last to first, because the last node of a softmax includes all of its factors.
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
class _Written:
    """A softmax in parts: ``exp(x) / (sum of exp(x) along dim + terms)``, in the dtype of ``root``.

    ``axes``: the axes of ``x``, in the atoms of the terms. ``root``: the model's ``exp`` or softmax. ``weights``: the
    probabilities. ``views``: the views between ``root`` and ``weights``. ``product``: the product of ``weights`` and
    values, if a factor follows it. ``later``: the views between this product and the last factor.
    """

    x: fx.Node
    dim: int
    axes: Axes
    terms: tuple[DivisorTerm, ...]
    root: fx.Node
    weights: fx.Node
    views: tuple[fx.Node, ...]
    product: fx.Node | None = None
    later: tuple[fx.Node, ...] = ()


def _written(node: fx.Node, tracer: ScoreTracer) -> _Written | None:
    found = factored(node, tracer.is_product)
    if found is not None:
        return _divided_after(node, found, tracer)
    return next((w for w in _sums(node) if _of_attention(node, w, tracer)), None)


def _divided_after(node: fx.Node, later: Factored, tracer: ScoreTracer) -> _Written | None:
    """Match a product of attention weights and values that is followed by factors of the weights."""
    product, labelled = later.of, product_labels(later.of)
    # A view after the last factor stays where it is.
    if labelled is None or not later.ends_with_a_factor or not _only_read_by(node, product):
        return None
    left, right, out = labelled
    for e, labels in (left, right):
        dims = [d for d, c in enumerate(labels) if c not in out]
        # If anything other than the product and the sum reads the weights, the weights have to stay.
        if len(dims) != 1 or len(e.users) > 2:
            continue
        after = partial(_after_product, later, labels, out)
        found = (replace(w, product=product, later=later.views) for w in _sums(e, after))
        if (first := next((w for w in found if _of_attention(node, w, tracer)), None)) is not None:
            return first
    return None


def _only_read_by(node: fx.Node, product: fx.Node) -> bool:
    """Whether a chain of nodes leads from ``product`` to ``node``, and each has only the next node as reader."""
    while product is not node:
        if len(product.users) != 1:
            return False
        (product,) = product.users
    return True


def _after_product(later: Factored, labels: str, out: str, weights: Axes, row: Axis) -> list[Placed] | None:
    """Return the factors after a product that sums over ``row``, an axis of ``weights``; None for other products."""
    axis_of = dict(zip(labels, weights, strict=True))
    if row not in (axis_of[c] for c in labels if c not in out):
        return None
    sizes = zip(out, shape(later.of), strict=True)
    followed = later.follow(tuple(axis_of.get(c) or fresh_axis(n) for c, n in sizes))
    return None if followed is None else followed[0]


def _of_attention(node: fx.Node, written: _Written, tracer: ScoreTracer) -> bool:
    # Outside of attentions, a softmax operator would change the rounding of the model for no gain.
    if written.product is None and between_products(node, tracer) is None:
        return False
    return (written.product is None and not written.terms) or tracer.trace(written.x) is not None


def _is_root(node: fx.Node) -> bool:
    return packet(node) is aten.exp or packet(node) in SOFTMAX


def _sums(weights: fx.Node, after: Callable[[Axes, Axis], list[Placed] | None] | None = None) -> Iterator[_Written]:
    """Yield the ways to read ``weights`` as a softmax.

    ``after``: returns the factors that are applied after the product of ``weights`` and values.
    """
    found = factored(weights, _is_root)
    if found is None:
        return
    root = found.of
    softmax = packet(root) in SOFTMAX
    if softmax and not found.factors and after is None:
        return
    (exponent, *dim) = args_of(root)[:2]
    rank = len(shape(root))
    for d in [axis(dim[0], rank)] if softmax else range(rank):
        rows = RowFactors(row_axes(shape(root), d), d)
        x, shift = rows.exponent(exponent)
        followed = found.follow(rows.axes)
        later = [] if after is None or followed is None else after(followed[1], rows.row)
        if followed is None or later is None:
            continue
        whole = rows.whole(rows.softmax() if softmax else 1 / shift, [*followed[0], *later])
        terms = None if whole is None else rows.divisor(whole)
        if terms is None or (softmax and not terms):
            continue
        if not any(depends_on(n.node, {x}) for term in terms for n, _ in term.powers):
            yield _Written(x, d, rows.axes, terms, root, weights, found.views)


def _replacement(builder: Builder, node: fx.Node, written: _Written) -> fx.Node:
    p, product = viewed(builder, _softmax(builder, written), written.views), written.product
    if product is not None:
        p = builder.cast(p, val(written.weights).dtype)
        given = fx.map_arg(product.args, lambda n: p if n is written.weights else n)
        assert callable(product.target)
        p = viewed(builder, builder.call(product.target, *given, **product.kwargs), written.later)
    new = builder.cast(p, val(node).dtype)
    if ORIGIN in node.meta:
        new.meta[ORIGIN] = node.meta[ORIGIN]  # the node of the untouched graph that computes this value
    return new


def _softmax(builder: Builder, written: _Written) -> fx.Node:
    """Add the softmax of the rows. ``terms`` become an additional score, whose column is dropped from the result."""
    call, dim = builder.call, written.dim
    # A sink may be in float32 while the scores are in half precision.
    x = builder.cast(written.x, dtype_of_terms(written.terms, val(written.root).dtype))
    if not written.terms:
        return call(aten.softmax.int, x, dim)
    column = sink_column(builder, written.terms, x, written.axes, dim, val(x).dtype)
    joined = call(aten.cat.default, [x, column], dim)
    return call(aten.slice.Tensor, call(aten.softmax.int, joined, dim), dim, 0, -1)
