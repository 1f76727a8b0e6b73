"""Find code that looks like an attention but could not be analysed.

A softmax between two products of activations is an attention. If the score tracer has no rule for an operator between
the products, there is no :class:`AttentionSite` for the attention. This analysis finds such an attention, so that the
report mentions it. The analysis also finds unknown operators that are named like an attention, or whose operands have
the shapes of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from mla_compile.passes.attention.flex import flex_of
from mla_compile.passes.attention.score_tracer import SOFTMAX, ScoreTracer
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.ir.graph import HANDED_OVER, args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.moves import Copy
from mla_compile.passes.ir.operators import decode, is_contraction
from mla_compile.passes.ir.schema import foreign_name
from mla_compile.passes.ir.sizes import same, same_sizes, size
from mla_compile.passes.ir.stand_in import REFUSED, waits
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, nearest, reachable

aten = torch.ops.aten


def unfollowed(
    graph: fx.Graph, weights: Collection[fx.Node], sites: Sequence[AttentionSite]
) -> list[tuple[fx.Node, Stop]]:
    """Return the softmax or operator of each attention that ``sites`` lacks, with the reason and the node to blame."""
    taken_apart = {flex.call for site in sites if (flex := flex_of(site.node)) is not None}
    taken_apart |= _waiting(graph)
    found = [(n, stop) for n in graph.nodes if n not in taken_apart and (stop := _closed(graph, n)) is not None]
    softmaxes = [n for n in graph.nodes if packet(n) in SOFTMAX and n not in weights]
    # These softmaxes belong to `sites`.
    known = {s for site in sites if site.probs is not None for s in _softmaxes_of(site.probs.node)}
    missing = [n for n in softmaxes if n not in known and not _over_one(n) and not _pools(n)]
    if not missing:
        return found
    tracer = ScoreTracer(weights)
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in missing:
        around = between_products(node, tracer)
        if around is None:
            found += [(node, stop)] if (stop := _cut_off(node, tracer)) is not None else []
            continue
        before, after = around
        lost = (
            n
            # Graph order ensures that the first operator without a rule is blamed.
            for n in sorted({*before, node, *after}, key=order.__getitem__)
            if tracer.trace(n) is None and any(tracer.trace(x) is not None for x in n.all_input_nodes)
        )
        blame = next(lost, node)
        reason = f"{blame.target} between the products of an attention is not understood"
        found.append((node, Stop(blame, "unsupported_op", reason)))
    return found


def _waiting(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that have a stand-in, and the nodes whose only readers, direct or indirect, are such nodes."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = [n for n in node.users if n.users or n.op == "output" or waits(n)]
        if waits(node) or (readers and found.issuperset(readers)):
            found.add(node)
    return found


_FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
_ATTENTION = ("attention", "attn", "attend", "fmha", "fwd_kvcache")
"""Words in the names of library operators that compute an attention or a step of an attention."""


def _closed(graph: fx.Graph, node: fx.Node) -> Stop | None:
    """Explain that ``node`` is an attention that cannot be analysed; None if it is not.

    Such a node is an opaque operator or calls a nested graph.
    """
    if node.op != "call_function" or not node.users or packet(node) is torch.ops.aten.scaled_dot_product_attention:
        return None
    if REFUSED in node.meta:
        return Stop(node, *node.meta[REFUSED])
    why = _nested(graph, node) or _of_a_library(node)
    return None if why is None else Stop(node, "unsupported_op", why)


def _nested(graph: fx.Graph, node: fx.Node) -> str | None:
    name = node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""
    name = name or getattr(packet(node), "__name__", "")
    if any(word in name for word in _FUSED):
        return f"{name} in a form that is not analysed"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        owner = graph.owning_module
        graphs = [getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        if any(isinstance(g, fx.GraphModule) and _attends(g) for g in graphs):
            return f"the attention is in a separate graph that {name} calls"
    return None


def _of_a_library(node: fx.Node) -> str | None:
    """Explain that an unknown operator seems to be an attention: its name or the shapes of its operands suggest it."""
    name = foreign_name(node)
    if name is None:
        return None
    short = name.partition("::")[2].lower()
    if not any(word in short for word in _ATTENTION) and not _combines(node):
        return None
    return f"{name} is not known: an attention inside it cannot be seen"


def _combines(node: fx.Node) -> bool:
    """Whether three consecutive operands and the result are shaped like queries, keys, values and their output.

    Keys and values agree in all sizes except the width, and so do queries and the result. Queries are as wide as keys,
    and the result is as wide as values. Three operands of equal shape are rejected, because gates and norms have such
    operands.
    """
    results = node.meta.get("val")
    first = results[0] if isinstance(results, (tuple, list)) and results else results
    if not isinstance(first, torch.Tensor) or first.dim() != 4:
        return False
    out = tuple(size(d) for d in first.shape)
    given = [n for n in node.all_input_nodes if is_tensor(n) and val(n).dtype.is_floating_point]
    for q, k, v in zip(given, given[1:], given[2:], strict=False):
        of_q, of_k, of_v = shape(q), shape(k), shape(v)
        if not len(of_q) == len(of_k) == len(of_v) == 4 or (of_q == of_k == of_v):
            continue
        alike = same_sizes(of_k[:-1], of_v[:-1]) and same_sizes(of_q[:-1], out[:-1]) and same(of_q[0], of_k[0])
        if alike and same(of_q[-1], of_k[-1]) and same(of_v[-1], out[-1]):
            return True
    return False


def _attends(gm: fx.GraphModule) -> bool:
    """Whether a nested graph contains a softmax or a fused attention, at any depth."""
    return any(
        packet(node) in SOFTMAX or any(word in str(node.target) for word in _FUSED)
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def between_products(node: fx.Node, tracer: ScoreTracer) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return the nodes on the way from a softmax to the products upstream, and on the way to the products downstream.

    Return None if one side has no product, as in a router's softmax over logits.
    """
    ends = _ends(tracer)
    products, before = nearest(node, lambda n: n.all_input_nodes, tracer.is_product, ends)
    sums, after = nearest(node, lambda n: n.users, tracer.is_product, ends)
    return (before, after) if products and sums else None


def _ends(tracer: ScoreTracer) -> Callable[[fx.Node], bool]:
    """Return a predicate that tells at which nodes a walk from a softmax to the nearest products ends."""
    # A product with a weight ends the walk, unless the product mixes the heads of the scores (talking heads).
    return lambda n: (
        is_contraction(n)
        and not any(_holds_scores(x, tracer) or _mixes_heads(n, x) for x in n.all_input_nodes if is_tensor(x))
    )


def _cut_off(softmax: fx.Node, tracer: ScoreTracer) -> Stop | None:
    """Explain a softmax that weighs values in this graph, but gets its scores from before a graph break."""
    sums, _ = nearest(softmax, lambda n: n.users, tracer.is_product, _ends(tracer))
    if not any(_weighs_keys(product, softmax) for product in sums):
        return None
    _, before = nearest(softmax, lambda n: n.all_input_nodes, tracer.is_product, is_contraction)
    scores = (n for n in before if HANDED_OVER in n.meta and is_tensor(n) and same_sizes(shape(n), shape(softmax)))
    node = next(scores, None)
    reason = "scores enter this graph from before a graph break: the queries and keys that make them are there"
    fix = "remove the graph break between the scores and the softmax (TORCH_LOGS=graph_breaks names it)"
    return None if node is None else Stop(softmax, "graph_break", reason, fix)


def _weighs_keys(product: fx.Node, softmax: fx.Node) -> bool:
    """Whether ``product`` sums values for each query: its result has an axis of ``softmax`` that the values lack."""
    labelled = product_labels(product)
    if labelled is None:
        return False
    *operands, out = labelled
    behind = [(set(labels), softmax in reachable([x], lambda n: n.all_input_nodes, REACH)) for x, labels in operands]
    return any(
        weighs and not weighs_too and (labels & set(out)) - others
        for (labels, weighs), (others, weighs_too) in (behind, behind[::-1])
    )


def _mixes_heads(node: fx.Node, x: fx.Node) -> bool:
    """Whether the product ``node`` has the shape of its operand ``x``, scores [batch, heads, queries, keys]."""
    sizes = shape(node)
    return len(sizes) > 3 and same_sizes(sizes, shape(x))


def _holds_scores(node: fx.Node, tracer: ScoreTracer) -> bool:
    """Whether ``node`` is traced back to products that read no probabilities, that is, to query-key products."""
    scores = tracer.trace(node)
    if scores is None:
        return False
    operands = (o.node for p in scores.products for o in (p.q, p.k))
    return all(tracer.probabilities(o) is None for o in operands)


def _softmaxes_of(probs: fx.Node) -> Iterable[fx.Node]:
    if packet(probs) in SOFTMAX:
        return (probs,)
    return nearest(probs, lambda n: n.all_input_nodes, lambda n: packet(n) in SOFTMAX, is_contraction)[0]


def _pools(softmax: fx.Node) -> bool:
    """Whether the softmax only pools tokens, as in ``(softmax(gate) * x).sum(tokens)``.

    Pooling is no attention: each number has its own weight. In an attention, all columns of a value share one weight.
    """
    dim = axis(args_of(softmax)[1], len(shape(softmax)))

    def summed(node: fx.Node) -> bool:
        if packet(node) is aten.sum:
            dims = argument(node, 1, "dim", ())
            return [axis(d, len(shape(softmax))) for d in dims or ()] == [dim]
        weighed = isinstance(decode(node), Copy) or packet(node) is aten.mul
        return weighed and same_sizes(shape(node), shape(softmax)) and bool(node.users) and all(map(summed, node.users))

    return all(map(summed, softmax.users))


def _over_one(softmax: fx.Node) -> bool:
    """Whether the softmax runs over a single score, as for a first token. The weight is then always 1."""
    sizes = shape(softmax)
    return same(sizes[axis(args_of(softmax)[1], len(sizes))], 1)
