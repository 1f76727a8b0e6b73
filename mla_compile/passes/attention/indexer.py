"""The indexer of a sparse attention: small heads whose weighted scores decide which keys a query sees.

    score[s,t] = sum_j weights[s,j] relu(scale * q[s,j,:] . k[t,:])            (DeepSeek-V3.2, arXiv 2512.02556, eq. 1)

The analysis starts from the ``topk`` that made an index list. It accepts matmul, bmm and einsum, a scale before or
after the relu, and any casts, views and permutations. The axes of the tensors identify an indexer: the keys have no
head axis, the weights have no key axis, and the weighted sum runs over heads only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.passes.attention.chosen import ranked
from mla_compile.passes.attention.score_tracer import ScoreTracer
from mla_compile.passes.attention.site import Chosen, Operand, Product
from mla_compile.passes.ir.axes import Axes, Axis, axis_size, flatten, fresh_axis
from mla_compile.passes.ir.graph import argument, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.moves import Copy, Rearrange, Reorder
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.walk import REACH, depends_on, reachable

aten = torch.ops.aten


@dataclass(frozen=True)
class Indexer:
    """The scores of an indexer.

    Attributes:
        out: the weighted sum, whose value a rewrite replaces.
        query: the queries, with axes of batch, queries, heads and features.
        keys: the keys, with axes of batch, tokens and features.
        weights: the weights of the heads, with axes of heads and perhaps of batch and queries.
        batch, queries, heads, tokens, features: the atoms of these axes.
        scale: the factor before the relu.
        factor: the factor after the relu.
    """

    out: Operand
    query: Operand
    keys: Operand
    weights: Operand
    batch: Axis
    queries: Axis
    heads: Axis
    tokens: Axis
    features: Axis
    scale: float
    factor: float


@dataclass(frozen=True)
class _Rectified:
    """``factor * relu(scale * product)``."""

    axes: Axes
    product: Product
    scale: float
    factor: float = 1.0


def indexers(lists: Iterable[Chosen], weights: Collection[fx.Node]) -> list[Indexer]:
    """Return the distinct indexers that made ``lists``."""
    tracer = ScoreTracer(weights)
    found = (_indexer_of(chosen, tracer) for chosen in lists)
    return list({one.out.node: one for one in found if one is not None}.values())


def with_keys(node: fx.Node, T: Size) -> list[fx.Node]:
    """Return the inputs of ``node`` that have an axis of length T, the number of keys."""
    return [n for n in node.all_input_nodes if is_tensor(n) and any(same(own, T) for own in shape(n))]


def _indexer_of(chosen: Chosen, tracer: ScoreTracer) -> Indexer | None:
    best = ranked(chosen, some=True)
    if best is None:
        return None
    T = axis_size(chosen.keys)
    for node in reachable([best[0]], lambda n: with_keys(n, T), REACH):
        found = _read(node, tracer) if packet(node) in LABELLED else None
        if found is not None:
            return found if same(axis_size(found.tokens), T) else None
    return None


def _read(node: fx.Node, tracer: ScoreTracer) -> Indexer | None:
    """Return the indexer whose weighted sum is ``node``."""
    labelled = product_labels(node)
    if labelled is None:
        return None
    *sides, out = labelled
    # The weights may be either operand.
    for (relus, relu_labels), weighted in (sides, sides[::-1]):
        inner = _rectified(relus, tracer)
        if inner is not None:
            found = _close(node, inner, relu_labels, weighted, out)
            return found if found is not None and _is_alone(found, inner) and _is_as_precise(found, inner) else None
    return None


def _rectified(node: fx.Node, tracer: ScoreTracer) -> _Rectified | None:
    if _is_relu(node):
        scores = tracer.trace(argument(node, 0, "self"))
        if scores is None or len(scores.products) != 1 or scores.masks or scores.open_core or scores.problem:
            return None
        if scores.normalized or scores.exponential or scores.settled:
            return None
        return _Rectified(scores.axes, scores.products[0], scores.scale)
    how = decode(node)
    if isinstance(how, (Copy, Reorder)):
        inner = _rectified(how.x, tracer)
        return None if inner is None else _moved(inner, node, how)
    if packet(node) not in (aten.mul, aten.div) or node.kwargs.get("rounding_mode"):
        return None
    x, by = node.args[:2]
    if packet(node) is aten.mul and isinstance(x, (int, float)):
        x, by = by, x
    if not is_tensor(x) or not isinstance(by, (int, float)):
        return None
    inner = _rectified(x, tracer)
    by = by if packet(node) is aten.mul else 1.0 / by
    return None if inner is None else replace(inner, factor=inner.factor * by)


def _is_relu(node: fx.Node) -> bool:
    if packet(node) is aten.relu:
        return True
    cut = packet(node) is aten.clamp and argument(node, 2, "max") is None
    least = argument(node, 1, "min") if cut or packet(node) is aten.clamp_min else None
    return isinstance(least, (int, float)) and least == 0


def _moved(inner: _Rectified, node: fx.Node, how: Copy | Reorder) -> _Rectified | None:
    if isinstance(how, Copy):
        return inner if val(node).dtype.is_floating_point else None
    carried = None if how.map is None else how.map.forward(inner.axes)
    return None if carried is None else replace(inner, axes=carried[0], product=inner.product.split(carried[1]))


def _close(node: fx.Node, inner: _Rectified, labels: str, weighted: tuple[fx.Node, str], out: str) -> Indexer | None:
    """Return the indexer; None if a tensor lacks the axes that an indexer needs."""
    axis_of = dict(zip(labels, inner.axes, strict=True))
    other, own = weighted
    # An axis that the products lack is an axis of the weights alone.
    weight_axes = tuple(
        () if same(s, 1) else axis_of.get(c) or fresh_axis(s) for c, s in zip(own, shape(other), strict=True)
    )
    # If keepdim leaves a reduced axis, no operand has its label.
    out_axes = tuple(axis_of.get(c, ()) for c in out)
    heads = flatten(axis for c, axis in axis_of.items() if c not in out)
    product = inner.product
    q, k = _origin(product.q), _origin(product.k)
    features = product.features
    if set(heads) & set(flatten(k.axes)):
        q, k = k, q
    of_q, of_k = (set(flatten(x.axes)) - set(features) for x in (q, k))
    of_products, of_weights = flatten(inner.axes), set(flatten(weight_axes))
    batch = tuple(a for a in of_products if a in of_q and a in of_k)
    tokens = tuple(a for a in of_products if a in of_k and a not in of_q)
    queries = tuple(a for a in of_products if a in of_q and a not in of_k and a not in heads)
    if not heads or not set(heads) <= of_q - of_k or not set(heads) <= of_weights or not tokens:
        return None
    if not of_weights <= {*batch, *queries, *heads} or set(of_products) != of_q | of_k:
        return None
    if sorted(map(id, flatten(out_axes))) != sorted(map(id, (*batch, *queries, *tokens))):
        return None
    return Indexer(
        Operand(node, out_axes), q, k, Operand(other, weight_axes), batch, queries, heads, tokens, features,
        inner.scale, inner.factor,
    )  # fmt: skip


def _origin(operand: Operand) -> Operand:
    """Return the tensor of which ``operand`` is a view or an exact copy, with its axes in the same atoms."""
    node, axes = operand.node, operand.axes
    while True:
        how = decode(node)
        if isinstance(how, Copy) and _is_exact(val(how.x).dtype, val(node).dtype):
            node = how.x
        elif isinstance(how, Rearrange) and how.map is not None and (before := how.map.backward(axes)) is not None:
            node, axes = how.x, before
        else:
            return Operand(node, axes)


def _is_exact(old: torch.dtype, new: torch.dtype) -> bool:
    return old == new or (old in (torch.float16, torch.bfloat16) and new == torch.float32)


def _is_alone(found: Indexer, inner: _Rectified) -> bool:
    """Whether nothing outside the indexer reads its products or any other intermediate tensor."""
    start = inner.product.node
    assert start is not None, "a product that is no fused attention has a node"
    made = [start]

    def behind(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n is start or depends_on(n, made)]

    inside = set(reachable(behind(found.out.node), lambda n: () if n is start else behind(n)))
    return all(user is found.out.node or user in inside for n in inside for user in n.users)


def _is_as_precise(found: Indexer, inner: _Rectified) -> bool:
    """Whether sums in float32 (float64 if the keys are float64) are at least as precise as the model's sums."""
    q, k, w, out = (val(o.node).dtype for o in (found.query, found.keys, found.weights, found.out))
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not all(d in floats for d in (q, k, w)) or (torch.float64 in (w, out) and k != torch.float64):
        return False
    return val(inner.product.q.node).dtype == val(inner.product.k.node).dtype
