"""Find every attention of a graph, however it is written.

Two kinds are found: PyTorch's fused operators (``scaled_dot_product_attention``, ``flex_attention``), and a softmax
between two products of activations (matmul, bmm, einsum). Scaling, masks, casts and reshapes may lie between the
products in any order. Axes are followed as atoms, so heads may be anywhere, and batch and heads may be merged.

If the score tracer has a rule for some other operator between the products, the attention is marked ``open_core``.
Examples are a soft cap, several sinks, probabilities that are returned to the caller, and exponentials that are
divided by their sum only after the value product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

import torch
from torch import fx

from mla_compile.passes.attention.flex import Flex, flex_of
from mla_compile.passes.attention.score_tracer import SOFTMAX, ScoreTracer
from mla_compile.passes.attention.scores import Scores, align_right, oriented
from mla_compile.passes.attention.site import NEGLIGIBLE, AttentionSite, MaskTerm, Operand, Product
from mla_compile.passes.ir.axes import Atom, Axis, flatten, fresh_axis
from mla_compile.passes.ir.graph import argument, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.sizes import same, same_sizes, size
from mla_compile.passes.ir.stand_in import waits
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, depends_on, reachable

aten = torch.ops.aten


def find_attention(graph: fx.Graph, weights: Collection[fx.Node]) -> list[AttentionSite]:
    """Return the attentions of ``graph`` in the order of their outputs."""
    sites: list[AttentionSite] = []
    tracer = ScoreTracer(weights)
    for node in graph.nodes:
        if packet(node) is aten.scaled_dot_product_attention and not waits(node):
            sites.append(_fused(node))
        elif (flex := flex_of(node)) is not None:
            sites.append(_flex(node, flex))
        elif tracer.is_product(node):
            site = _written_out(node, tracer.probabilities)
            if site is not None:
                sites.append(site)
    return sites


def find_other_weights(graph: fx.Graph, weights: Collection[fx.Node]) -> list[tuple[AttentionSite, fx.Node]]:
    """Return attentions that weigh keys by an elementwise function of the scores instead of a softmax.

    Each attention is paired with the first nonlinear operator. :func:`find_attention` ignores such attentions.
    """
    tracer = ScoreTracer(weights, every_map=True)

    def mapped(node: fx.Node) -> Scores | None:
        scores = tracer.trace(node)
        return None if scores is None or scores.mapped is None or scores.normalized or scores.exponential else scores

    found: list[tuple[AttentionSite, fx.Node]] = []
    for node in graph.nodes:
        site = _written_out(node, mapped) if tracer.is_product(node) else None
        if site is None or site.probs is None or site.problem is not None or not site.keys:
            continue
        scores = mapped(site.probs.node)
        if scores is not None and scores.mapped is not None and not _beside_a_softmax(site.probs.node):
            found.append((site, scores.mapped))
    return found


def _beside_a_softmax(weights_of_keys: fx.Node) -> bool:
    """Whether the weights of the keys depend on a softmax, which the tracer could not follow."""

    def inputs(node: fx.Node) -> Collection[fx.Node]:
        return () if is_contraction(node) else node.all_input_nodes

    return any(packet(n) in SOFTMAX for n in reachable([weights_of_keys], inputs, REACH))


def _fused(node: fx.Node) -> AttentionSite:
    q, k, v = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    mask, causal = argument(node, 3, "attn_mask"), bool(argument(node, 5, "is_causal", False))
    dropout, scale = argument(node, 4, "dropout_p", 0.0), argument(node, 6, "scale")
    site = _plain(node, q, k, v, grouped=bool(argument(node, 7, "enable_gqa", False)))
    masks: tuple[MaskTerm, ...] = ()
    if mask is not None:
        kind: Literal["keep", "add"] = "keep" if val(mask).dtype == torch.bool else "add"
        masks = (MaskTerm(kind, Operand(mask, align_right(mask, (*site.out.axes[:-1], site.keys)))),)
    return replace(
        site,
        masks=masks,
        causal=causal,
        scale=float(scale) if isinstance(scale, (int, float)) else _default_scale(q),
        problem=_fused_problem(node, q, dropout, scale, site.queries, site.keys, causal=causal),
    )


def _flex(node: fx.Node, flex: Flex) -> AttentionSite:
    site = _plain(node, flex.q, flex.k, flex.v, grouped=not same(shape(flex.q)[1], shape(flex.k)[1]))
    why = None if flex.score_mod is None else "score_mod of flex_attention is between the products"
    return replace(site, scale=flex.scale, open_core=why, call=flex.call)


def _plain(node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, *, grouped: bool) -> AttentionSite:
    """Return the attention of a fused operator. If ``grouped``, each head of k and v serves several heads of q."""
    rank = len(shape(q))
    lead: list[Axis] = []
    k_lead: list[Axis] = []
    v_lead: list[Axis] = []
    for d in range(rank - 2):
        sizes = [shape(x)[d] for x in (q, k, v)]
        # Any of q, k and v may broadcast along a leading axis.
        full = next((s for s in sizes if not same(s, 1)), 1)
        own = fresh_axis(full)
        own_k, own_v = (() if same(s, 1) else own for s in sizes[1:])
        if grouped and d == rank - 3 and not same(sizes[1], 1) and not same(sizes[0], sizes[1]):
            heads, kv_heads = sizes[0], sizes[1]
            assert isinstance(heads, int)
            assert isinstance(kv_heads, int)
            # Neighbouring query heads share a key head, so the key heads are the outer factor of the head axis.
            own = (Atom(kv_heads), Atom(heads // kv_heads))
            own_k = own_v = own[:1]
        lead.append(own)
        k_lead.append(own_k)
        v_lead.append(own_v)
    queries, keys = fresh_axis(shape(q)[-2]), fresh_axis(shape(k)[-2])
    features, values = fresh_axis(shape(q)[-1]), fresh_axis(shape(v)[-1])
    product = Product(Operand(q, (*lead, queries, features)), Operand(k, (*k_lead, keys, features)), features)
    return AttentionSite(
        out=Operand(node, (*lead, queries, values)),
        products=(product,),
        v=Operand(v, (*v_lead, keys, values)),
        lead=flatten(lead),
        queries=queries,
        keys=keys,
        empty="zero",
    )


def _default_scale(q: fx.Node) -> float:
    width = size(val(q).shape[-1])
    # A symbolic width is refused by `_fused_problem`, so any scale will do here.
    return 1.0 / math.sqrt(width) if isinstance(width, int) and width > 0 else 1.0


def _fused_problem(
    node: fx.Node, q: fx.Node, dropout: object, scale: object, queries: Axis, keys: Axis, *, causal: bool
) -> Stop | None:
    if dropout != 0.0:
        return Stop(node, "dropout", f"attention dropout of {dropout} is active")
    # Rewrites change the width of the heads and write the scale as a number, so both have to be constants.
    if isinstance(scale, fx.Node) or not isinstance(size(val(q).shape[-1]), int):
        return Stop(node, "unsupported_op", "a scale or head width that is not a constant")
    if causal and not same_sizes([a.size for a in queries], [b.size for b in keys]):
        one = all(same(a.size, 1) for a in queries)
        sees = "the one query sees the first key only" if one else "the first query sees the first key only"
        detail = f"is_causal with another number of queries than keys: PyTorch aligns it to the first key, so {sees}"
        fix = "leave is_causal out if the one query is to see all keys" if one else "give a mask instead"
        return Stop(node, "unsupported_op", detail, fix)
    return None


def _written_out(node: fx.Node, weighs: Callable[[fx.Node], Scores | None]) -> AttentionSite | None:
    """Return the attention whose value product is ``node``. ``weighs`` traces probabilities back to their scores."""
    labelled = product_labels(node)
    assert labelled is not None, "a product has labels"
    (left, left_labels), (right, right_labels), out_labels = labelled
    # The probabilities may be the left or the right operand: `v^T p^T` is the same product.
    for p, p_labels, v, v_labels in (
        (left, left_labels, right, right_labels),
        (right, right_labels, left, left_labels),
    ):
        scores = weighs(p)
        if scores is not None:
            return _close(node, scores, p, p_labels, v, v_labels, out_labels)
    return None


def _close(
    node: fx.Node, scores: Scores, p: fx.Node, p_labels: str, v: fx.Node, v_labels: str, out_labels: str
) -> AttentionSite | None:
    summed = [c for c in p_labels if c not in out_labels]
    # A product that sums over any axis other than the keys (heads, for example) is not a value product.
    if len(summed) != 1 or summed[0] not in v_labels:
        return None
    axis_of = dict(zip(p_labels, scores.axes, strict=True))
    for label, s in zip(v_labels, shape(v), strict=True):
        if not axis_of.get(label, ()):
            axis_of[label] = fresh_axis(s)
    v_axes = tuple(() if same(s, 1) else axis_of[c] for c, s in zip(v_labels, shape(v), strict=True))
    keys = axis_of[summed[0]]
    # The values are summed over the keys, even if the softmax runs over the queries.
    scores = replace(scores, products=tuple(oriented(p, keys) for p in scores.products))
    # Exponentials without a softmax are normalised over the keys.
    if not scores.normalized:
        scores = replace(scores, softmax=keys)
    out_axes = tuple(axis_of.get(c, ()) for c in out_labels)
    shared = {a for product in scores.products for a in flatten(product.k.axes)} | set(flatten(v_axes))
    rows = [a for a in flatten(scores.axes) if a not in keys]
    # An atom that only the queries have represents query tokens. If there are several such atoms, the innermost
    # represents query tokens, and the others represent heads (MQA).
    own = [a for a in rows if a not in shared]
    queries = tuple(own[-1:])
    lead = tuple(a for a in rows if a not in queries)
    return AttentionSite(
        out=Operand(node, out_axes),
        products=scores.products,
        v=Operand(v, v_axes),
        lead=lead,
        queries=queries,
        keys=keys,
        masks=scores.masks,
        scale=scores.scale,
        sinks=scores.sinks,
        empty="nan",
        probs=Operand(p, scores.axes),
        open_core=scores.open_core or _core_is_shared(node, p, scores),
        problem=scores.problem or _misplaced_softmax(node, scores, keys),
    )


def _core_is_shared(node: fx.Node, p: fx.Node, scores: Scores) -> str | None:
    """Explain why the computation between the products has to stay; None if it can be removed."""
    finite = [m.fill for m in scores.masks if m.kind != "add" and m.fill != float("-inf")]
    if not all(fill < NEGLIGIBLE for fill in finite):
        return "masked scores are set to a number that the softmax can see"
    # In a row where every key is masked, the softmax sees only the fills. If the fills differ, the largest decides. A
    # kernel that knows only which keys are hidden cannot reproduce this.
    if len(set(finite)) > 1 or 0 < len(finite) < len(scores.masks):
        return "masks with different fills, whose order matters in rows without a visible key"
    products = {q.node for q in scores.products if q.node is not None}
    if scores.sinks is not None and depends_on(scores.sinks.node, products):
        return "a sink is computed from the scores"
    inside = {p}
    queue = [p]
    masks = {m.operand.node for m in scores.masks}
    while queue:
        for n in queue.pop().all_input_nodes:
            if n not in inside and n not in masks and (n in products or depends_on(n, products)):
                inside.add(n)
                if n not in products:
                    queue.append(n)
    # If an outside node reads one of these tensors, the tensor has to be computed anyway.
    if any(user is not node and user not in inside for n in inside for user in n.users):
        return "scores or probabilities are used elsewhere too"
    return None


def _misplaced_softmax(node: fx.Node, scores: Scores, keys: Axis) -> Stop | None:
    """Explain why the softmax does not run over the keys; None if it does."""
    q_atoms = {a for product in scores.products for a in flatten(product.q.axes)}
    if set(scores.softmax) != set(keys):
        return Stop(node, "softmax_axis", "the softmax does not run over the keys that the values are summed over")
    # The softmax runs over the summed axis, but this axis is not an axis of the keys alone.
    if set(keys) & q_atoms or not all(set(keys) <= set(flatten(p.k.axes)) for p in scores.products):
        return Stop(node, "softmax_axis", "the values are not summed over the keys of the query-key product")
    return None
