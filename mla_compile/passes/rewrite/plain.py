"""Emit plain attention as nodes: ``softmax(modify(scale * q k) + masks) v``.

Callers emit the two products, and this module emits the operators in between. The formula is the one in
:mod:`mla_compile.kernels.reference`: scores are float32 or wider, and a row without a visible key gives zero, as in
PyTorch's fused attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from mla_compile.passes.ir.graph import Builder, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten


def masked_scores(
    builder: Builder,
    scores: fx.Node,
    scale: float | fx.Node,
    masks: Iterable[fx.Node] = (),
    modify: Callable[[fx.Node], fx.Node] | None = None,
) -> fx.Node:
    """Return ``modify(scale * scores)`` plus the float masks, or minus infinity where a boolean mask is False."""
    scores = builder.call(aten.mul.Tensor, scores, scale)
    if modify is not None:
        scores = modify(scores)
    for mask in masks:  # if `masks` is a generator, it adds nodes in this loop
        if val(mask).dtype == torch.bool:
            scores = hidden(builder, scores, builder.call(aten.logical_not.default, mask))
        else:
            scores = builder.call(aten.add.Tensor, scores, builder.cast(mask, val(scores).dtype))
    return scores


def hidden(builder: Builder, scores: fx.Node, where: fx.Node) -> fx.Node:
    """Set ``scores`` to minus infinity where ``where`` is True."""
    return builder.call(aten.masked_fill.Scalar, scores, where, float("-inf"))


def positions(
    builder: Builder, queries: tuple[fx.Node, int], keys: tuple[fx.Node, int], lengths: fx.Node | None = None
) -> tuple[fx.Node, fx.Node]:
    """Return the positions of the queries [S,1] and of the keys [T]; the last query has the last key's position.

    ``queries`` and ``keys``: a tensor, and its dimension along which the queries or keys lie. If ``lengths`` [B] are
    given, the last query is the last valid token of a batch entry, and query positions have shape [B,1,S,1].
    """
    call = builder.call
    s, t = builder.size(*queries), builder.size(*keys)
    device = val(queries[0]).device
    rows, columns = (call(aten.arange.default, n, device=device) for n in (s, t))
    rows = call(aten.unsqueeze.default, rows, 1)
    if lengths is not None:
        last = call(aten.sub.Tensor, call(aten.clamp.default, lengths, 0, t), s)
        for dim in (1, 2, 3):
            last = call(aten.unsqueeze.default, last, dim)
        return call(aten.add.Tensor, rows, last), columns
    square = same(shape(queries[0])[queries[1]], shape(keys[0])[keys[1]])
    if square:
        return rows, columns
    shift = call(operator.sub, t, s) if isinstance(s, fx.Node) or isinstance(t, fx.Node) else t - s
    return call(aten.add.Tensor, rows, shift), columns


def future(builder: Builder, rows: fx.Node, columns: fx.Node) -> fx.Node:
    """Return a mask that is True where the key comes after the query, for positions from :func:`positions`."""
    return builder.call(aten.gt.Tensor, columns, rows)


def probabilities(builder: Builder, scores: fx.Node, *, some_empty: bool) -> fx.Node:
    """Return the softmax over the last axis, the keys.

    ``some_empty``: whether a row may have no visible key. Such a row becomes zero instead of NaN.
    """
    probs = builder.call(aten.softmax.int, scores, -1)
    if not some_empty:
        return probs
    empty = builder.call(aten.eq.Scalar, builder.call(aten.amax.default, scores, [-1], keepdim=True), float("-inf"))
    return builder.call(aten.masked_fill.Scalar, probs, empty, 0.0)
