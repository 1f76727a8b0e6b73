"""Plain attention as nodes: ``softmax(modify(scale * q k) + masks) v``.

Callers add the two products themselves, with the axes they have; what lies between the two comes from here. It is the
formula of :mod:`mla_compile.kernels.reference`: scores are given in float32 or wider, and a row without a visible key
is zero, as in PyTorch's fused attention.
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
    """``modify(scale * scores)``, then the masks: a floating one is added, a boolean one hides where it is False."""
    scores = builder.call(aten.mul.Tensor, scores, scale)
    if modify is not None:
        scores = modify(scores)
    for mask in masks:  # may be a generator that adds nodes: each mask is prepared where it is used
        if val(mask).dtype == torch.bool:
            scores = hidden(builder, scores, builder.call(aten.logical_not.default, mask))
        else:
            scores = builder.call(aten.add.Tensor, scores, builder.cast(mask, val(scores).dtype))
    return scores


def hidden(builder: Builder, scores: fx.Node, where: fx.Node) -> fx.Node:
    """``scores``, minus infinity ``where`` that is True."""
    return builder.call(aten.masked_fill.Scalar, scores, where, float("-inf"))


def future(builder: Builder, queries: tuple[fx.Node, int], keys: tuple[fx.Node, int]) -> fx.Node:
    """[queries, keys]: True where a key comes after the query, the last query being the token of the last key.

    Both are given as a tensor and the dimension of it that they lie along.
    """
    call = builder.call
    s, t = builder.size(*queries), builder.size(*keys)
    device = val(queries[0]).device
    rows, columns = (call(aten.arange.default, n, device=device) for n in (s, t))
    square = same(shape(queries[0])[queries[1]], shape(keys[0])[keys[1]])
    shift = None if square else call(operator.sub, t, s) if isinstance(s, fx.Node) or isinstance(t, fx.Node) else t - s
    rows = call(aten.unsqueeze.default, rows, 1)
    if shift is not None:
        rows = call(aten.add.Tensor, rows, shift)
    return call(aten.gt.Tensor, columns, rows)


def probabilities(builder: Builder, scores: fx.Node, some_empty: bool) -> fx.Node:
    """The softmax over the keys, the last axis; ``some_empty``: a row may have no visible key, and is zero, not NaN."""
    probs = builder.call(aten.softmax.int, scores, -1)
    if not some_empty:
        return probs
    empty = builder.call(aten.eq.Scalar, builder.call(aten.amax.default, scores, [-1], True), float("-inf"))
    return builder.call(aten.masked_fill.Scalar, probs, empty, 0.0)
