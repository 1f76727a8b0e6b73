"""Trace attention scores from the query-key product to the softmax and on to the value product.

Between the products, models write scales, masks, casts and reshapes in any order. The tracer follows axes as atoms. It
walks back from the value product until it reaches a product of two activations. The tracer can also follow some
operators that are not in the plain formula. ``open_core`` then names the operator, and the products can still be
rewritten one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from mla_compile.passes.attention.scores import Padded, Scores, added_up, align_right, converted, oriented, rounded
from mla_compile.passes.attention.site import MaskTerm, Operand, Product
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, fresh_axis
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.moves import Copy, Dropout, Expand, Fill, Join, Reorder, Select, Slice
from mla_compile.passes.ir.operators import decode, rule_for
from mla_compile.passes.ir.sizes import same, same_sizes
from mla_compile.passes.ir.stop import Stop

aten = torch.ops.aten


SOFTMAX = {aten.softmax, aten._softmax, aten._safe_softmax}
_ELEMENTWISE = {
    aten.tanh, aten.clamp, aten.nan_to_num, aten.sub, aten.sigmoid, aten.relu, aten.maximum, aten.minimum, aten.max,
    aten.min,
}  # fmt: skip


_LINEAR = {aten.nan_to_num, aten.sub}
_MAPS = {
    aten.abs, aten.celu, aten.clamp_max, aten.clamp_min, aten.elu, aten.erf, aten.gelu, aten.hardsigmoid,
    aten.hardswish, aten.hardtanh, aten.leaky_relu, aten.log_sigmoid, aten.mish, aten.pow, aten.relu6, aten.selu,
    aten.silu, aten.softplus, aten.square, aten.threshold,
}  # fmt: skip
_TRIANGLES = {aten.tril, aten.triu}


class ScoreTracer:
    """Traces scores back from a node and memoises the results for this graph.

    With ``every_map``, the tracer also follows elementwise functions that occur only in attentions without a softmax.
    """

    def __init__(self, weights: Collection[fx.Node], *, every_map: bool = False) -> None:
        self.weights = weights
        self.further = {*_MAPS, *_TRIANGLES} if every_map else set()
        self._seen: dict[fx.Node, Scores | None] = {}

    def is_product(self, node: fx.Node) -> bool:
        """Whether ``node`` multiplies two activations along an axis."""
        labelled = product_labels(node) if packet(node) in LABELLED else None
        return labelled is not None and not any(o in self.weights for o, _ in labelled[:2])

    def probabilities(self, node: fx.Node) -> Scores | None:
        scores = self.trace(node)
        return scores if scores is not None and (scores.normalized or scores.exponential) else None

    def trace(self, node: fx.Node) -> Scores | None:
        if node not in self._seen:
            self._seen[node] = None  # until it has been traced
            self._seen[node] = self._trace(node)
        return self._seen[node]

    def _trace(self, node: fx.Node) -> Scores | None:
        if self.is_product(node):
            return _product(node)
        how = decode(node)
        if how is not None:
            move = rule_for(_MOVES, how)
            return None if move is None or not is_tensor(node) else move(self, node, how)
        rule = _elementwise if packet(node) in self.further else _RULES.get(packet(node))
        return None if rule is None or not is_tensor(node) else rule(self, node)


def _product(node: fx.Node) -> Scores | None:
    labelled = product_labels(node)
    assert labelled is not None
    (left, left_labels), (right, right_labels), out = labelled
    axis_of: dict[str, Axis] = {}
    for x, labels in ((left, left_labels), (right, right_labels)):
        for label, s in zip(labels, shape(x), strict=True):
            if not axis_of.get(label, ()):
                axis_of[label] = fresh_axis(s)
    summed = [c for c in left_labels if c not in out]
    # Exactly one label may be summed, and both operands must have it.
    if len(summed) != 1 or summed[0] not in right_labels or any(c not in out for c in right_labels if c not in summed):
        return None

    def operand(x: fx.Node, labels: str) -> Operand:
        return Operand(x, tuple(() if same(s, 1) else axis_of[c] for c, s in zip(labels, shape(x), strict=True)))

    features = axis_of[summed[0]]
    # The softmax, which runs over the keys, will tell which operand is the query. Until then, the left operand is taken
    # as the query.
    axes = tuple(axis_of.get(c, ()) for c in out)  # keepdim leaves a reduced axis whose label no operand has
    return Scores(axes, (Product(operand(left, left_labels), operand(right, right_labels), features, node, axes),))


def _copied(tracer: ScoreTracer, node: fx.Node, how: Copy) -> Scores | None:
    scores = tracer.trace(how.x)
    if scores is None or not val(node).dtype.is_floating_point:
        return None
    return converted(scores, val(how.x).dtype, val(node).dtype)


def _dropped(tracer: ScoreTracer, node: fx.Node, how: Dropout) -> Scores | None:
    scores = tracer.trace(how.x)
    if scores is None or not how.active:
        return scores
    return replace(scores, problem=Stop(node, "dropout", "dropout of the attention probabilities is active"))


def _rearranged(tracer: ScoreTracer, node: fx.Node, how: Reorder) -> Scores | None:
    scores = tracer.trace(how.x)
    carried = None if scores is None or how.map is None else how.map.forward(scores.axes)
    return None if scores is None or carried is None else replace(scores.split(carried[1]), axes=carried[0])


def _scale(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    if node.kwargs.get("rounding_mode"):
        return None
    a, b = args_of(node)[0], args_of(node)[1]
    if not isinstance(a, fx.Node) or (isinstance(b, fx.Node) and tracer.trace(a) is None):
        a, b = b, a
        if packet(node) is aten.div:
            return None
    scores = tracer.trace(a) if isinstance(a, fx.Node) else None
    if scores is None or not isinstance(a, fx.Node) or not _keeps_shape(node, a):
        return None
    scores = scores.changed()
    if not isinstance(b, (int, float)) or scores.normalized:
        return scores.opened("scores or probabilities are multiplied by a tensor")
    # Earlier masks and fills are scaled with the scores, and fills are rounded to the dtype of the result.
    by = 1.0 / b if packet(node) is aten.div else float(b)
    dtype = val(node).dtype
    masks = tuple(replace(m, scale=m.scale * by, fill=rounded(m.fill * by, dtype)) for m in scores.masks)
    return replace(scores, scale=scores.scale * by, masks=masks)


def _keeps_shape(node: fx.Node, x: fx.Node) -> bool:
    return same_sizes(shape(x), shape(node))


def _add(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    a, b = args_of(node)[0], args_of(node)[1]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        kept = tracer.trace(a) if isinstance(a, fx.Node) else None
        return None if kept is None else kept.opened("a constant is added to the scores")
    left, right = tracer.trace(a), tracer.trace(b)
    alpha = node.kwargs.get("alpha", 1)
    if left is not None and right is not None:
        joined = added_up(left, right)
        return joined if joined is None or alpha == 1 else joined.opened("products with different scales are added up")
    scores, other, x = (left, b, a) if left is not None else (right, a, b)
    if scores is None or not _keeps_shape(node, x):
        return None
    # A tensor that is added after the softmax is not a mask. A tensor that is multiplied by alpha is not followed.
    scores = scores.changed()
    if scores.normalized or alpha != 1 or not is_tensor(other):
        return scores.opened("something is added to the probabilities")
    return replace(scores, masks=(*scores.masks, MaskTerm("add", Operand(other, align_right(other, scores.axes)))))


def _fill(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    """Follow ``masked_fill(x, mask, value)``, ``where(mask, x, value)`` and ``where(mask, value, x)``."""
    kind: Literal["keep", "drop"]
    if packet(node) is aten.masked_fill:
        x, mask, value, kind = args_of(node)[0], args_of(node)[1], args_of(node)[2], "drop"
    else:
        mask, x, value, kind = args_of(node)[0], args_of(node)[1], args_of(node)[2], "keep"
        # In `where(mask, value, scores)` the condition marks the scores that are replaced.
        if not isinstance(x, fx.Node) or tracer.trace(x) is None:
            x, value, kind = value, x, "drop"
    scores = tracer.trace(x) if isinstance(x, fx.Node) else None
    if scores is None or not isinstance(x, fx.Node) or not is_tensor(mask) or not _keeps_shape(node, x):
        return None
    number, scores = _constant(value), scores.changed()
    if number is None or scores.normalized:
        return scores.opened("scores are replaced by a tensor")
    operand = Operand(mask, align_right(mask, scores.axes))
    return replace(scores, masks=(*scores.masks, MaskTerm(kind, operand, fill=rounded(number, val(node).dtype))))


def _constant(value: object) -> float | None:
    """Return ``value`` if it is a number, or the fill of a constant tensor."""
    if isinstance(value, (int, float)):
        return float(value)
    how = decode(value)
    if isinstance(how, Copy) and isinstance(value, fx.Node):
        number = _constant(how.x)
        return None if number is None else rounded(number, val(value).dtype)
    return _constant(how.value) if isinstance(how, Fill) else None


def _softmax(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    scores = tracer.trace(args_of(node)[0])
    if scores is None or scores.normalized:
        return None
    # `softmax(x, dtype=float32)` converts before it exponentiates.
    scores = converted(scores, val(args_of(node)[0]).dtype, val(node).dtype)
    over = scores.axes[axis(args_of(node)[1], len(scores.axes))]
    # A constant that is subtracted along the axis of the softmax does not change the result. Numbers that vary along
    # this axis do.
    if scores.below_top not in (None, over):
        scores = scores.opened("the maximum along another axis is subtracted")
    joined = next((p for p in scores.padded if over == (p.longer,)), None)
    if joined is not None and joined.sink is None:
        scores = scores.opened("the softmax runs over more than the keys")
    # The axis of the softmax is the axis of the keys, plus the column of the sink.
    shorter = {p.longer: p.own for p in scores.padded}
    over = tuple(b for a in over for b in shorter.get(a, (a,)))
    products = tuple(oriented(p, over) for p in scores.products)
    if packet(node) is aten._safe_softmax:
        scores = scores.opened("a softmax that gives zeros for empty rows")
    sinks = None if joined is None else joined.sink
    return replace(scores, products=products, softmax=over, normalized=True, sinks=sinks)


def _exponential(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    """Follow the exponential of a softmax that is written out with exp, sum and division."""
    scores = tracer.trace(args_of(node)[0])
    return None if scores is None else replace(scores.opened("weights without a softmax"), exponential=True)


def _elementwise(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    """Follow an operator that keeps the axes but is not part of the plain formula, such as a soft cap."""
    for x in args_of(node):
        scores = tracer.trace(x) if is_tensor(x) else None
        if scores is not None and _keeps_shape(node, x):
            linear = packet(node) in _LINEAR or packet(node) in _TRIANGLES
            scores = scores if linear or scores.mapped else replace(scores, mapped=node)
            return scores.opened(f"{packet(node).__name__} between the products")
    return None


def _subtracted(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    """Follow ``x - x.max(dim, keepdim=True)``: subtracting the maximum does not change a softmax along ``dim``."""
    x = args_of(node)[0]
    scores = tracer.trace(x) if is_tensor(x) and args_of(node)[2:] == () and not node.kwargs else None
    along = None if scores is None or scores.normalized else _top_of(x, args_of(node)[1])
    if scores is None or along is None or scores.below_top is not None:
        return _difference(tracer, node) or _elementwise(tracer, node)
    return replace(scores, below_top=scores.axes[along])


def _difference(tracer: ScoreTracer, node: fx.Node) -> Scores | None:
    """Follow the difference of the results of two softmaxes (differential attention)."""
    a, b = (tracer.trace(x) if is_tensor(x) else None for x in args_of(node)[:2])
    both = a is not None and b is not None and a.normalized and b.normalized
    return added_up(a, b) if both and a is not None and b is not None else None


def _top_of(x: fx.Node, top: object) -> int | None:
    """Return the dimension along which ``top`` is the maximum of ``x`` with keepdim; None for any other ``top``."""
    if packet(top) is operator.getitem and isinstance(top, fx.Node) and top.args[1] == 0:
        top = top.args[0]
    if packet(top) not in (aten.max, aten.amax) or not isinstance(top, fx.Node) or args_of(top)[0] is not x:
        return None
    dims, keeps = argument(top, 1, "dim", ()), argument(top, 2, "keepdim", False)
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return axis(dims[0], len(shape(x))) if len(dims) == 1 and isinstance(dims[0], int) and keeps is True else None


def _joined(tracer: ScoreTracer, node: fx.Node, how: Join) -> Scores | None:
    """Follow scores to which columns are joined, such as an attention sink."""
    dim = how.dim
    for k, x in enumerate(how.parts):
        scores = tracer.trace(x)
        # The keys may come before or after the sink.
        start = sum(shape(before)[dim] for before in how.parts[:k])
        if scores is not None and not scores.normalized and isinstance(start, int):
            longer = Atom(shape(node)[dim])
            axes = tuple((longer,) if k == dim else a for k, a in enumerate(scores.axes))
            others = [part for j, part in enumerate(how.parts) if j != k]
            # Joining a float32 sink to half-precision scores promotes the scores.
            scores = converted(scores, val(x).dtype, val(node).dtype)
            sink = None if scores.settled else _sink(scores, others, dim)
            padded = (*scores.padded, Padded(longer, scores.axes[dim], start, sink))
            scores = replace(scores, axes=axes, padded=padded)
            return scores if sink is not None else scores.opened("columns are appended to the scores")
    return None


def _sink(scores: Scores, parts: Sequence[fx.Node], dim: int) -> Operand | None:
    """Return the only column in ``parts``, before its expansion over batch and queries; None if there are several."""
    if len(parts) != 1 or not same(shape(parts[0])[dim], 1):
        return None
    node = parts[0]
    while isinstance(how := decode(node), Expand):
        node = how.x
    axes = tuple(() if k == dim else a for k, a in enumerate(scores.axes))
    return Operand(node, align_right(node, axes))


def _sliced(tracer: ScoreTracer, node: fx.Node, how: Slice) -> Scores | None:
    """Follow a slice that removes joined columns."""
    scores, dim = tracer.trace(how.x), how.dim
    if scores is None or _keeps_shape(node, how.x):
        return scores
    own = scores.axes[dim]
    padded = next((p for p in scores.padded if own == (p.longer,)), None)
    if padded is None or how.bounds is None:
        return None
    start, _, step = how.bounds
    # Exactly the columns of the keys must remain.
    if (start or 0, step) != (padded.start, 1) or not same(axis_size(padded.own), shape(node)[dim]):
        return None
    axes = tuple(padded.own if k == dim else a for k, a in enumerate(scores.axes))
    return replace(scores, axes=axes)


def _selected(tracer: ScoreTracer, node: fx.Node, how: Select) -> Scores | None:
    """Follow a selection from probabilities, as in differential attention with one softmax call."""
    scores = tracer.trace(how.x)
    if scores is None or not scores.normalized or scores.padded or how.index is None:
        return None
    own = scores.axes[how.dim]
    if set(own) & set(scores.softmax) or not all(isinstance(a.size, int) for a in own):
        return None
    axes = (*scores.axes[: how.dim], *scores.axes[how.dim + 1 :])
    return replace(scores, axes=axes).opened("weights are selected")


_MOVES: dict[type, Callable[[ScoreTracer, fx.Node, Any], Scores | None]] = {
    Copy: _copied,
    Dropout: _dropped,
    Reorder: _rearranged,
    Join: _joined,
    Slice: _sliced,
    Select: _selected,
}
_RULES: dict[object, Callable[[ScoreTracer, fx.Node], Scores | None]] = {
    **dict.fromkeys((aten.mul, aten.div), _scale),
    aten.add: _add,
    **dict.fromkeys((aten.masked_fill, aten.where), _fill),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    aten.exp: _exponential,
    aten.sub: _subtracted,
}
