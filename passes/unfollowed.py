"""Analysis: softmaxes that look like the core of an attention but were not found to be one.

A softmax between two products of activations is an attention to everyone who reads the code. Where something stands
between them that the score tracer has no rule for, there is no :class:`AttentionSite`; without this the report would
not mention it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from mla_compile.passes.graph import args_of, axis, is_tensor, packet, same, shape
from mla_compile.passes.linear_contract import CONTRACTIONS
from mla_compile.passes.linear_map import Stop
from mla_compile.passes.scores import SOFTMAX, ScoreTracer
from mla_compile.passes.site import AttentionSite

_REACH = 48  # operators between a softmax and either product: scale, masks, casts and a sink are a dozen


def unfollowed(
    graph: fx.Graph, weights: Collection[fx.Node], sites: Sequence[AttentionSite]
) -> list[tuple[fx.Node, Stop]]:
    """The softmaxes of attentions that are not among ``sites``, each with the node where following it ended."""
    softmaxes = [n for n in graph.nodes if packet(n) in SOFTMAX and n not in weights]
    known = {s for site in sites if site.probs is not None for s in _softmaxes_of(site.probs.node)}
    missing = [n for n in softmaxes if n not in known and not _over_one(n)]
    if not missing:
        return []
    tracer = ScoreTracer(weights)
    order = {n: i for i, n in enumerate(graph.nodes)}
    found: list[tuple[fx.Node, Stop]] = []
    for node in missing:
        around = between_products(node, tracer)
        if around is None:
            continue
        before, after = around
        lost = (
            n
            for n in sorted({*before, node, *after}, key=order.__getitem__)
            if tracer.trace(n) is None and any(tracer.trace(x) is not None for x in n.all_input_nodes)
        )
        blame = next(lost, node)
        reason = f"{blame.target} between the products of an attention is not understood"
        found.append((node, Stop(blame, "unsupported_op", reason)))
    return found


def between_products(node: fx.Node, tracer: ScoreTracer) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """What lies between a softmax and the products before and after it.

    ``None`` where one of them is missing: a router's softmax over logits, or one that weighs nothing.
    """

    def mixes_scores(n: fx.Node) -> bool:
        return any(tracer.trace(x) is not None and _same_shape(n, x) for x in n.all_input_nodes if is_tensor(x))

    def mixes_weights(n: fx.Node) -> bool:
        return len(shape(n)) > 2 and any(_same_shape(n, x) for x in n.all_input_nodes if is_tensor(x))

    products, before = nearest(node, lambda n: n.all_input_nodes, tracer.is_product, mixes_scores)
    sums, after = nearest(node, lambda n: n.users, tracer.is_product, mixes_weights)
    return (before, after) if products and sums else None


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return len(shape(a)) == len(shape(b)) and all(same(x, y) for x, y in zip(shape(a), shape(b), strict=True))


def nearest(
    start: fx.Node,
    step: Callable[[fx.Node], Iterable[fx.Node]],
    wanted: Callable[[fx.Node], bool],
    passes: Callable[[fx.Node], bool] = lambda _: False,
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nearest wanted nodes, and those passed on the way.

    A projection by a weight ends the walk, because it belongs to what comes before or after the attention, unless it
    ``passes``: a matrix that mixes the heads of the scores.
    """
    ends: list[fx.Node] = []
    passed: list[fx.Node] = []
    queue, seen = list(step(start)), {start}
    while queue and len(passed) < _REACH:
        node = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if wanted(node):
            ends.append(node)
        elif packet(node) not in CONTRACTIONS or passes(node):
            passed.append(node)
            queue.extend(step(node))
    return ends, passed


def _over_one(softmax: fx.Node) -> bool:
    """Whether each score is alone, so that its weight is 1 whatever it is: the first token, without a past."""
    sizes = shape(softmax)
    return same(sizes[axis(args_of(softmax)[1], len(sizes))], 1)


def _softmaxes_of(probs: fx.Node) -> Iterable[fx.Node]:
    if packet(probs) in SOFTMAX:
        return (probs,)
    return nearest(probs, lambda n: n.all_input_nodes, lambda n: packet(n) in SOFTMAX)[0]
