"""Replaces a softmax that is written with exponentials by the operator, so that the attention is found.

Before: ``e = exp(x - amax(x, -1, True)); p = e / e.sum(-1, True)``, or ``p = exp(x - logsumexp(x, -1, True))``

Before: ``out = (e @ v) / e.sum(-1, True)``, flash-style: divided after the product

After: ``p = softmax(x, -1)``, and ``out = p @ v``. Any subtracted shift cancels if it is one number per row. If an
exponential without a shift overflows, the original gives NaN and the softmax does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.score_tracer import ScoreTracer
from mla_compile.passes.attention.unfollowed import between_products
from mla_compile.passes.ir.graph import Builder, args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.moves import Regroup
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same_sizes
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten


def write_softmax(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Replace the written-out softmaxes of attentions; return how many. All others stay as they are."""
    found = 0
    tracer = ScoreTracer(weights)
    for node in list(graph.nodes):
        match = _ratio(node) or _shifted_by_its_logarithm(node)
        # Elsewhere, a softmax would change the rounding of a model for no gain.
        if match is None or between_products(node, tracer) is None:
            continue
        x, dim = match
        node.replace_all_uses_with(Builder(node, fake_mode).call(aten.softmax.int, x, dim))
        found += 1
    for node in list(graph.nodes):
        late = _divided_after(node, tracer)
        if late is None or tracer.trace(late.x) is None:
            continue
        builder = Builder(node, fake_mode)
        weights_of_keys = builder.call(aten.softmax.int, late.x, late.dim)
        given = fx.map_arg(late.product.args, lambda n, p=weights_of_keys, e=late.e: p if n is e else n)  # type: ignore[misc]
        assert callable(late.product.target)
        node.replace_all_uses_with(builder.call(late.product.target, *given, **late.product.kwargs))
        found += 1
    if found:
        remove_dead_code(graph)
    return found


@dataclass(frozen=True)
class _Late:
    """``product / sum(e)``, where ``product`` is weighted by ``e = exp(x - shift)`` along ``dim`` of ``e``."""

    product: fx.Node
    e: fx.Node
    x: fx.Node
    dim: int


def _divided_after(node: fx.Node, tracer: ScoreTracer) -> _Late | None:
    """Match a weighted sum that is divided by the sum of its weights, which have no other reader."""
    divided = _division(node)
    if divided is None or not is_tensor(divided[0]) or not tracer.is_product(divided[0]):
        return None
    product, total = divided
    labelled = product_labels(product)
    if labelled is None or not _alike(node, product):
        return None
    left, right, out = labelled
    for e, labels in (left, right):
        summed = [c for c in labels if c not in out]
        dim = _summed_axis(total, e)
        if packet(e) is not aten.exp or dim is None or summed != [labels[dim]] or len(product.users) != 1:
            continue
        # The division aligns the sums with the output by position, so each position has to be the same axis in both.
        aligned = len(labels) == len(out) and all(
            a == b for d, (a, b) in enumerate(zip(labels, out, strict=True)) if d != dim
        )
        if not aligned or not same_sizes(_without(e, dim), _without(product, dim)) or len(e.users) != 2:
            continue
        (x,) = args_of(e)
        return _Late(product, e, _unshifted(x, dim), dim)
    return None


def _without(x: fx.Node, dim: int) -> list[Size]:
    return [n for d, n in enumerate(shape(x)) if d != dim]


def _division(node: fx.Node) -> tuple[Any, object] | None:
    """Return ``a`` and ``b`` of ``a / b`` or ``a * reciprocal(b)``."""
    # A third argument, or a keyword, is a rounding mode.
    if packet(node) not in (aten.div, aten.mul) or len(args_of(node)) != 2 or node.kwargs:
        return None
    a, b = args_of(node)
    if packet(node) is aten.div:
        return a, b
    # `a * b` is not a ratio, however `b` was made.
    return (a, args_of(b)[0]) if packet(b) is aten.reciprocal else None


def _ratio(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Match ``e / sum(e)`` or ``e * reciprocal(sum(e))``; return the exponent and the axis."""
    divided = _division(node)
    if divided is None:
        return None
    e, total = divided
    dim = _summed_axis(total, e)
    if packet(e) is not aten.exp or dim is None or not _alike(node, e):
        return None
    (x,) = args_of(e)
    return _unshifted(x, dim), dim


def _summed_axis(total: object, e: object) -> int | None:
    """Return the one axis along which ``total`` is the sum of ``e``, kept as an axis of size 1."""
    if not is_tensor(total) or not is_tensor(e):
        return None
    sizes, kept = shape(total), True
    lifted = decode(total)
    if isinstance(lifted, Regroup):  # the reduced axis is restored
        total, kept = lifted.x, False
    if packet(total) is not aten.sum or args_of(total)[0] is not e or "dtype" in total.kwargs:
        return None
    dims = argument(total, 1, "dim")
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or bool(argument(total, 2, "keepdim", False)) is not kept:
        return None
    dim = axis(dims[0], len(shape(e)))
    # The shape shows where the axis was restored: elsewhere the division would broadcast along another axis.
    row = [1 if k == dim else size for k, size in enumerate(shape(e))]
    return dim if same_sizes(row, sizes) else None


def _unshifted(x: fx.Node, dim: int) -> fx.Node:
    """Return ``x`` before one number was subtracted from each of its rows along ``dim``."""
    if packet(x) is aten.sub and not x.kwargs and len(args_of(x)) == 2:
        source, shift = args_of(x)
        if is_tensor(source) and is_tensor(shift) and _alike(x, source):
            # Broadcasting aligns from the right. The shift must not vary along the softmax: it lacks that axis, or has
            # it with size 1.
            place = dim - (val(x).dim() - val(shift).dim())
            if place < 0 or val(shift).shape[place] == 1:
                return source
    return x


def _shifted_by_its_logarithm(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Match ``exp(x - logsumexp(x))``."""
    if packet(node) is not aten.exp or not isinstance(args_of(node)[0], fx.Node):
        return None
    (difference,) = args_of(node)
    if packet(difference) is not aten.sub or difference.kwargs or len(args_of(difference)) != 2:
        return None
    x, shift = args_of(difference)
    if packet(shift) is not aten.logsumexp or args_of(shift)[0] is not x or not _alike(node, x):
        return None
    dims = args_of(shift)[1]
    # Without `keepdim`, the subtraction broadcasts along another axis, if the sizes agree at all.
    if len(dims) != 1 or not argument(shift, 2, "keepdim", False):
        return None
    return x, axis(dims[0], val(x).dim())


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have the same shape and dtype, so that neither was broadcast or promoted to the other."""
    return val(a).dtype == val(b).dtype and val(a).dtype.is_floating_point and same_sizes(shape(a), shape(b))
